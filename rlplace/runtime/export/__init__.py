"""Plans in the formats of other tools: torch scripts, torchtitan job files, device maps; and their trainers."""
