"""The executor: step time and peak memory of a plan."""
