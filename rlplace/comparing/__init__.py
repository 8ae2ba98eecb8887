"""Planners side by side: the same problems, the same simulator, the same budgets, one row a planner and problem."""

from rlplace.comparing.records import Comparison, ProblemInfo, Row, Settings, Summary
from rlplace.comparing.run import Case, compare, count_rows, gather
from rlplace.comparing.store import Store

__all__ = ["Case", "Comparison", "ProblemInfo", "Row", "Settings", "Store", "Summary", "compare", "count_rows", "gather"]
