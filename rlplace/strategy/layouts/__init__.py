"""Tensor-parallel layouts of a block by PaSE's elimination."""
