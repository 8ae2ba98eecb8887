"""What the command line shows in its help; imports nothing."""

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "metis", "m_etf", "best")
"""Quick planners, among them a floor that no plan should miss."""
