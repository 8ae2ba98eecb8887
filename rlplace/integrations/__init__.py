"""Plans in the training loops of other packages, each an optional extra."""
