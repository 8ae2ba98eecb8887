"""Pictures of a plan: the HTML report, and what the environments render."""

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "metis", "m_etf", "best")
"""Quick planners of a report's table, with baselines that every plan should beat."""
