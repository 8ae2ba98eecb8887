"""Planners side by side: the same problems, the same simulator, the same budgets, one row a planner and problem."""

from rlplace.explanation.compare.records import Comparison, ComparisonRow, ProblemInfo, Settings, Summary
from rlplace.explanation.compare.run import Case, compare, count_rows, gather
from rlplace.explanation.compare.store import Store

__all__ = [
    "Case", "Comparison", "ComparisonRow", "ProblemInfo", "Settings", "Store", "Summary", "compare", "count_rows", "gather",
]  # fmt: skip
