"""The op graph of a training step: its record, file, checks, coarsening."""
