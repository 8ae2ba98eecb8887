"""Which engine runs a plan."""

from __future__ import annotations

import importlib
from types import ModuleType

from rlplace.errors import InputError, unknown_name
from rlplace.runtime.distributed.execution.engine import ChosenEngine, Setup

ENGINES = {
    "pipeline": "rlplace.runtime.distributed.pipeline.engine",
    "stage_graph": "rlplace.runtime.distributed.execution.make",
    "joint_graph": "rlplace.runtime.distributed.joint.make",
    "replay": "rlplace.runtime.distributed.execution.replay",
}
"""Modules of the engines by name; the first that can run a plan does, except that `replay` has to be asked for.

Each has ``why_not(plan, graph, processes)``: why it cannot run a plan with the forward graph `graph` of its model on so many
processes, and what could; None: it can, and ``make(setup)`` makes it. `why_not` needs no process group.
"""


def engine_module(name: str) -> ModuleType:
    """The module of an engine, see `ENGINES`."""
    return importlib.import_module(ENGINES[name])


def choose_engine(setup: Setup, name: str | None = None) -> ChosenEngine:
    """Makes the engine of that name, or the first that can run the plan.

    Raises:
        InputError: No engine can run the plan, with the reasons.
    """
    if name is not None and name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    reasons = []
    for candidate in [name] if name is not None else [name for name in ENGINES if name != "replay"]:
        engine = engine_module(candidate)
        reason = engine.why_not(setup.plan, setup.graph, setup.ranks.world)
        if reason is None:
            return engine.make(setup)
        reasons.append(f"{candidate}: {reason}")
    raise InputError("distribute: no engine can run this plan: " + "; ".join(reasons))
