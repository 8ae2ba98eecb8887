"""Shared parts of planners: scores and counted calls, candidates and repair, group arrays, moves, bounds."""
