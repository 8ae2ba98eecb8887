"""Jobs: training under torchrun, and plans verified and timed on its processes."""
