"""Which engine runs a placement."""

from __future__ import annotations

import importlib

from rlplace.errors import InputError, unknown_name
from rlplace.runtime.check import backward_elsewhere
from rlplace.runtime.distributed.execution.engine import ChosenEngine, Setup

ENGINES = {
    "stage_graph": "rlplace.runtime.distributed.execution.make",
    "joint_graph": "rlplace.runtime.distributed.joint.make",
    "replay": "rlplace.runtime.distributed.execution.replay",
}
"""Modules of the engines by name; each has ``make(setup)``. `replay` has to be asked for."""


def choose_engine(setup: Setup, name: str | None = None) -> ChosenEngine:
    """Makes the engine of that name, or the one that fits: segments, unless backward ops run elsewhere than their forward ops.

    Raises:
        InputError: There is no such engine, or it cannot run the plan.
    """
    moved = backward_elsewhere(setup.plan)
    if name is None:
        name = "stage_graph" if moved is None else "joint_graph"
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if moved is not None and name != "joint_graph":
        raise InputError(
            f"distribute: engine {name} leaves backward to autograd, which runs it where the forward ran, but the plan moves "
            f"{moved!r}; the engine joint_graph runs it"
        )
    chosen: ChosenEngine = importlib.import_module(ENGINES[name]).make(setup)
    return chosen
