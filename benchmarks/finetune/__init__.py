"""Fine-tuning on measured plans against searches with the same measurements; see `__main__`."""
