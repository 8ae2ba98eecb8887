"""The agent against the classical searches, all from the same floor: rows in a file, tables and claims out of them.

See `benchmarks.agent.__main__` for the command.
"""
