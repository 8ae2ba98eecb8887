"""Planners: each takes a problem and returns a `PlacementPlan`.

The table holds strings, so that listing planners imports none of them and lower rooms can name higher ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from rlplace import plugins as extensions
from rlplace.errors import InputError, unknown_name
from rlplace.plan.schedule import GPIPE, ONE_F_ONE_B

if TYPE_CHECKING:
    from rlplace.placement.ask import Attempt
    from rlplace.plan import PlacementPlan
    from rlplace.problem import Problem

PLANNERS: dict[str, str] = {
    "single": "rlplace.placement.simple:single",
    "round_robin": "rlplace.placement.simple:round_robin",
    "random": "rlplace.placement.simple:random_plans",
    "balanced": "rlplace.placement.simple:balanced",
    "heft": "rlplace.placement.list_scheduling:heft",
    "m_topo": "rlplace.placement.simple:m_topo",
    "m_etf": "rlplace.placement.list_scheduling:m_etf",
    "metis": "rlplace.placement.metis:metis",
    "critical_path": "rlplace.placement.list_scheduling:critical_path",
    "compiler": "rlplace.placement.published.compiler:compiler",
    "pardnn": "rlplace.placement.published.pardnn:pardnn",
    "bipartition": "rlplace.placement.published.bipartition:bipartition",
    "annealing": "rlplace.placement.annealing:annealing",
    "local_search": "rlplace.placement.local_search:local_search",
    "cp_sat": "rlplace.placement.cp_sat:cp_sat",
    "dlplacer": "rlplace.placement.published.dlplacer:dlplacer",
    "best": "rlplace.placement.search:best",
    "agent": "rlplace.agents.planner:agent",
}
"""Planner name to ``"module:function"``."""

ONE_SHOT = (
    "single", "round_robin", "heft", "m_etf", "critical_path", "pardnn", "metis", "balanced", "m_topo", "compiler",
)  # fmt: skip
"""Planners that build plans without search, quick and strong ones first; `best` is the best of these."""

NEEDS_SPLIT = frozenset({"bipartition"})
"""Planners that place forward and backward passes apart and so take `rlplace.cost.contract.split_backward(problem)`."""

OF_STRATEGIES = {
    "pase": "pipeline=1 shard=1 context=1 expert=1 microbatches=1 recompute=none offload=none",
    "gpipe": f"replicate=1 shard=1 tensor=1 context=1 expert=1 schedule={GPIPE} recompute=none,full offload=none",
    "pipedream": f"shard=1 tensor=1 context=1 expert=1 schedule={ONE_F_ONE_B} recompute=none offload=none",
}
"""Published planners that answer whole strategies, and the space in which each does: `rlplace.place` and `compare` ask them."""

Planner = Callable[..., "PlacementPlan"]


def get_planner(name: str) -> Planner:
    """Returns the function of a planner: a built-in one, or one of an installed package, whose plans are checked
    (docs/plugins.md).

    Raises:
        InputError: Unknown name, with the nearest known one; or a planner of whole strategies.
    """
    if name in OF_STRATEGIES:
        raise InputError(f"planner {name} chooses whole strategies and places no groups; name the model instead of a problem")
    if name not in PLANNERS:
        extension = extensions.find(extensions.PLANNERS, name, PLANNERS)
        if extension is None:
            raise unknown_name("planner", name, planner_names())
        from rlplace.placement.foreign import foreign_planner

        return cast(Planner, foreign_planner(extension))
    module, function = PLANNERS[name].split(":")
    return getattr(import_module(module), function)


def planner_options(name: str) -> frozenset[str] | None:
    """Returns the options that a planner of placements takes beside seed and time limit; None: any.

    Raises:
        InputError: As `get_planner`.
    """
    parameters = inspect.signature(get_planner(name)).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    return named - {"seed", "time_limit_s"}


def planner_names() -> list[str]:
    """Returns the built-in planners and those of installed packages, which are not imported for that."""
    return [*PLANNERS, *OF_STRATEGIES, *extensions.names(extensions.PLANNERS, PLANNERS)]


def run_planner(name: str, problem: Problem, **options: Any) -> Attempt:
    """Runs a planner by name and measures it; takes the arguments of `rlplace.placement.ask.attempt`, raises errors."""
    from rlplace.placement.ask import attempt

    return attempt(get_planner(name), problem, catch=(), **options)


__all__ = [
    "NEEDS_SPLIT", "OF_STRATEGIES", "ONE_SHOT", "PLANNERS", "Planner", "get_planner", "planner_names",
    "planner_options", "run_planner",
]  # fmt: skip
