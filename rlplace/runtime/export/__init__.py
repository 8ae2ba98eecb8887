"""Plans in the words of other tools: torch scripts, torchtitan job files, device maps, trainers."""
