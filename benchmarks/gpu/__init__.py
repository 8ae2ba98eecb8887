"""What one CUDA device tells: kernels, steps, memory and placed models, in slices that can be resumed."""
