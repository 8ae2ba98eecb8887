"""Planners side by side: the same problems, the same simulator, the same budgets, one row a planner and problem."""

from rlplace.comparing.records import Comparison, ComparisonRow, ProblemInfo, Settings, Summary
from rlplace.comparing.run import Case, compare, count_rows, gather
from rlplace.comparing.store import Store

__all__ = [
    "Case", "Comparison", "ComparisonRow", "ProblemInfo", "Settings", "Store", "Summary", "compare", "count_rows", "gather",
]  # fmt: skip
