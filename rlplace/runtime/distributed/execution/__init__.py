"""Batches and outputs of a step, what travels between processes, and what a process is doing."""
