"""The agent against the classical searches, all from the same floor; see `benchmarks.agent.__main__` for the command."""
