"""Bi-Partition: forward and backward passes of a pipeline cut at different layers."""
