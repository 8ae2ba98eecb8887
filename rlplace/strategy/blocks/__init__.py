"""Blocks of a model with their prices and the lifetimes of their tensors."""
