"""What engines are made from and what comes of it; why plans are refused that most engines cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.check import backward_elsewhere
from rlplace.runtime.distributed.execution.engine import Engine
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own
from rlplace.schedule import FREE_SCHEDULES, SCHEDULES
from rlplace.text import either


@dataclass(frozen=True, eq=False)
class Setup:
    """What `rlplace.distribute` was given.

    Attributes:
        model: The whole model, with values.
        plan: The plan.
        graph: Its forward graph for the example inputs.
        ranks: The processes.
        problem: What the plan was made for, where the caller has it.
        replayed: The problem whose times a replay sleeps; None: `problem`.
    """

    model: nn.Module
    plan: PlacementPlan
    graph: ForwardGraph
    ranks: Ranks
    problem: Problem | None
    replayed: Problem | None = None


@dataclass(frozen=True, eq=False)
class ChosenEngine:
    """An engine chosen for a plan.

    Attributes:
        name: The engine's name.
        own: What this process holds.
        engine_for: Makes the engine for the graph of one signature of inputs; must not hold on to the whole model.
    """

    name: str
    own: Own
    engine_for: Callable[[ForwardGraph], Engine]


def why_not_whole_ops(plan: PlacementPlan) -> str | None:
    """Why an engine that cuts no ops cannot run a plan; None: it can."""
    if plan.shards:
        return f"it cuts no ops, and the plan cuts {len(plan.shards)}; the sharded engine may, or plan without shards"
    return None


def why_not_autograd(plan: PlacementPlan) -> str | None:
    """Why an engine that leaves backward to autograd cannot run a plan; None: it can."""
    moved = backward_elsewhere(plan)
    return why_not_whole_ops(plan) or (
        None
        if moved is None
        else f"autograd runs backward ops where their forward ops ran, the plan moves {moved!r}; the joint-graph engine runs it"
    )


def why_not_free(plan: PlacementPlan) -> str | None:
    """Why an engine that runs passes in any order of devices cannot keep to a plan's schedule; None: it can."""
    if not SCHEDULES[plan.schedule].free:
        return f"schedule {plan.schedule} is for chains of stages, which the pipeline engine runs; use {either(FREE_SCHEDULES)}"
    return None
