"""Capture of one training step of a model as a graph of ops and tensors."""
