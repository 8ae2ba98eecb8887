"""Ranks, training steps, micro-batches and faults, which all runtimes share."""
