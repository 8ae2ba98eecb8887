"""Ranks, values and traces of a forward that all runtimes share."""
