"""Batches of a step, what travels between devices, and what a process is doing."""
