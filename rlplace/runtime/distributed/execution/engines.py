"""Which engine runs a plan, and how its engines are made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from rlplace.errors import InputError, unknown_name
from rlplace.plan.plan import FREE_SCHEDULES, PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.check import backward_elsewhere
from rlplace.runtime.distributed.execution.engine import Engine, StepOptions
from rlplace.runtime.distributed.graph.assign import assign, planned_groups, planned_spots
from rlplace.runtime.distributed.graph.cut import cut_graph
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.order import expected_of
from rlplace.runtime.distributed.graph.recomputed import recompute_sets
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own, own_tensors


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
class Made:
    """An engine chosen for a plan.

    Attributes:
        name: Of the engine.
        own: What this process holds.
        engine_for: Makes the engine for the graph of one signature of inputs; must not hold on to the whole model.
    """

    name: str
    own: Own
    engine_for: Callable[[ForwardGraph], Engine]


def make_stage_graph(setup: Setup, *, replay: bool = False) -> Made:
    """The stage-graph engine, or the one that replays times on the same cut."""
    from rlplace.runtime.distributed.execution.replay import ReplayEngine
    from rlplace.runtime.distributed.execution.stage_graph import StageGraphEngine

    plan, ranks, source = setup.plan, setup.ranks, setup.graph
    planned, groups = planned_spots(plan), planned_groups(plan)
    assigned = assign(source, planned, None, groups)
    first = cut_graph(source, assigned, "group", plan.recompute)
    own = own_tensors(setup.model, first.owners, source.constants, ranks.place, ranks.device)
    places = {name: who[0] for name, who in own.owners.items()}
    expected = None if setup.problem is None else expected_of(setup.problem)
    slept = expected if setup.replayed is None else expected_of(setup.replayed)
    kind = partial(ReplayEngine, slept) if replay else StageGraphEngine

    def engine_for(graph: ForwardGraph) -> Engine:
        assignment = assigned if graph is source else assign(graph, planned, places, groups)
        cut = first if graph is source else cut_graph(graph, assignment, "group", plan.recompute)
        options = StepOptions(plan.schedule, expected, recompute_sets(plan.recompute, assignment), plan.optimizer_sharding)
        return kind(cut, ranks, own.holding(graph.constants, ranks.device), options)

    return Made("replay" if replay else "stage_graph", own, engine_for)


def make_replay(setup: Setup) -> Made:
    """See `rlplace.runtime.distributed.execution.replay`."""
    if setup.problem is None:
        raise InputError("distribute: replay needs the problem that the plan was made for; give problem=")
    return make_stage_graph(setup, replay=True)


ENGINES = {
    "pipeline": "rlplace.runtime.distributed.pipeline.make:make_pipeline",
    "stage_graph": "rlplace.runtime.distributed.execution.engines:make_stage_graph",
    "joint_graph": "rlplace.runtime.distributed.joint.make:make_joint",
    "sharded": "rlplace.runtime.distributed.sharded.setup:make_sharded",
    "replay": "rlplace.runtime.distributed.execution.engines:make_replay",
}
"""Engines by name; the first that can run a plan does, except that `replay` has to be asked for."""


def why_not(name: str, plan: PlacementPlan, graph: ForwardGraph, processes: int) -> str | None:
    """Why an engine cannot run a plan, and what could; None: it can. Needs no process group.

    Args:
        name: Of the engine.
        plan: The plan.
        graph: The forward graph of its model.
        processes: Of the job.
    """
    if name == "sharded":
        from rlplace.runtime.distributed.sharded import refuse

        return refuse.why_not(plan, graph, processes)
    if plan.shards:
        return f"it cuts no ops, and the plan cuts {len(plan.shards)}; the sharded engine may, or plan without shards"
    if name == "joint_graph":
        from rlplace.runtime.distributed.joint import make

        return make.why_not(plan)
    moved = backward_elsewhere(plan)
    if moved is not None:
        return (
            f"autograd runs backward ops where their forward ops ran, the plan moves {moved!r}; the joint-graph engine runs it"
        )
    if name == "pipeline":
        from rlplace.runtime.distributed.pipeline import support

        return support.why_not(cut_graph(graph, assign(graph, planned_spots(plan))), plan)
    if plan.schedule not in FREE_SCHEDULES:
        return f"schedule {plan.schedule} is for chains of stages, which the pipeline engine runs; use list, gpipe or 1f1b"
    return None


def choose_engine(setup: Setup, name: str | None = None) -> Made:
    """Makes the engine of that name, or the first that can run the plan.

    Raises:
        InputError: No engine can run the plan, with the reasons.
    """
    if name is not None and name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    reasons = []
    for candidate in [name] if name is not None else [name for name in ENGINES if name != "replay"]:
        reason = why_not(candidate, setup.plan, setup.graph, setup.ranks.world)
        if reason is None:
            module, _, function = ENGINES[candidate].partition(":")
            made: Made = getattr(importlib.import_module(module), function)(setup)
            return made
        reasons.append(f"{candidate}: {reason}")
    raise InputError("distribute: no engine can run this plan: " + "; ".join(reasons))
