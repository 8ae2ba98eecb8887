"""Simulated annealing from the floor, in one compiled loop."""
