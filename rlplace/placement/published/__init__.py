"""Planners of published systems: Bi-Partition, the compiler-driven partitioner, DLPlacer, ParDNN."""
