"""Timing ops of a model and links of a cluster, for the cost model."""
