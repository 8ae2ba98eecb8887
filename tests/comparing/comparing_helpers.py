"""Planners made for the tests, registered under a name for the time of a test."""

import sys
import types

from rlplace.comparing import Case
from rlplace.placing import Priced
from rlplace.planners import PLANNERS


def register(monkeypatch, **planners):
    """Puts functions into the planner table."""
    module = types.ModuleType("planners_of_a_test")
    for name, function in planners.items():
        setattr(module, name, function)
        monkeypatch.setitem(PLANNERS, name, f"planners_of_a_test:{name}")
    monkeypatch.setitem(sys.modules, "planners_of_a_test", module)


def case(problem, name="toy", cluster=""):
    return Case(name, cluster, lambda: Priced.problem(problem))
