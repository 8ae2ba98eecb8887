"""Expansion of a strategy to ops, to check the block executor by the simulator."""
