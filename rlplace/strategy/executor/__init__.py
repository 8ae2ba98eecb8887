"""The block executor: step time and memory of a strategy, compiled."""
