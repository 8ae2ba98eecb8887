"""The learned placer, imported as `rlplace.agents`."""
