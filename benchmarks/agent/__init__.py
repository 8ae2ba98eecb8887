"""The agent against the classical searches, all from the same floor: rows in a file, tables out of them.

See `benchmarks.agent.__main__` for the command.
"""
