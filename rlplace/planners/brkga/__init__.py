"""A biased random-key genetic algorithm from the floor."""
