"""Jobs: training under torchrun and inside other trainers, faults, verifying and timing plans."""
