"""The plan: which device runs which group."""

from rlplace.plan.plan import PlacementPlan, check_plan, make_plan
from rlplace.plan.prediction import Prediction

__all__ = ["PlacementPlan", "Prediction", "check_plan", "make_plan"]
