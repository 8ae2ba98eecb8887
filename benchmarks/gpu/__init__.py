"""Measurements of one CUDA device: kernels, steps, memory and placed models, in slices that can be resumed."""
