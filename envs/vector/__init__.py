"""Environments that step many problems in one compiled call; `gymnasium.make_vec` makes them (docs/agent/environments.md)."""
