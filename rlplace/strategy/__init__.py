"""Whole strategies: what blocks cost, what a strategy takes, and the search for the best one."""
