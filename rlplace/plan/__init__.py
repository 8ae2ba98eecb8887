"""The plan: which device runs which group."""

from rlplace.plan.plan import PlacementPlan, check_plan, make_plan

__all__ = ["PlacementPlan", "check_plan", "make_plan"]
