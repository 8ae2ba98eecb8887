"""Shipped checkpoints, read through `rlplace.agents.checkpoint`."""
