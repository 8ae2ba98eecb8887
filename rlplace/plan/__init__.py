"""The plan: which device runs which group."""

from rlplace.plan.plan import SCHEDULES, PlacementPlan, check_plan, make_plan

__all__ = ["SCHEDULES", "PlacementPlan", "check_plan", "make_plan"]
