"""What planners share: scores and counted calls, candidates and repair, group arrays, moves, bounds."""
