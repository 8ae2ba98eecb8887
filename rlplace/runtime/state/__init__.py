"""Weights and optimizer state: the parts that a process holds, checkpoints, and whole state on one process."""
