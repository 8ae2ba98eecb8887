"""PipeDream's planner: stages with replicas by dynamic programming over states of the graph."""
