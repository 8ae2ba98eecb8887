"""Plans in the words of other tools: a training script of plain torch, a job file of torchtitan."""
