"""Defaults that the command line shows in its help; imports nothing."""

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "metis", "m_etf", "best")
"""Quick planners of a report's table, with baselines that every plan should beat."""
