"""Checks of the published systems: their models, expert strategies, baselines and run-time parts.

A sub-package for each system; `python -m benchmarks.papers.SYSTEM` prints the tables of its page in docs/planners.
"""
