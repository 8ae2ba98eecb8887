"""The learned placer, imported as `rlplace.agents`: network, policy, training, checkpoints, and the agent as a planner."""
