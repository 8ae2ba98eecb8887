"""The engine of placements: forward and backward ops of a model, each on the device that a plan says."""
