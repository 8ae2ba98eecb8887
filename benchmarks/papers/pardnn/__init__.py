"""ParDNN: training graphs of the size that the paper reports, and its graph baselines."""
