"""Which engine runs a plan, and how its engines are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from rlplace.errors import InputError, unknown_name
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.assign import assign, planned_groups, planned_spots
from rlplace.runtime.distributed.cut import cut_graph
from rlplace.runtime.distributed.engine import Engine
from rlplace.runtime.distributed.forward_graph import ForwardGraph
from rlplace.runtime.distributed.order import expected_of
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.recomputed import recompute_sets
from rlplace.runtime.distributed.tensors import Own, own_tensors


@dataclass(frozen=True, eq=False)
class Setup:
    """What `rlplace.distribute` was given.

    Attributes:
        model: The whole model, with values.
        plan: The plan.
        graph: Its forward graph for the example inputs.
        ranks: The processes.
        problem: What the plan was made for, where the caller has it.
    """

    model: nn.Module
    plan: PlacementPlan
    graph: ForwardGraph
    ranks: Ranks
    problem: Problem | None


@dataclass(frozen=True, eq=False)
class Made:
    """An engine chosen for a plan.

    Attributes:
        name: Of the engine.
        own: What this process holds.
        engine_for: Makes the engine for the graph of one signature of inputs.
    """

    name: str
    own: Own
    engine_for: Callable[[ForwardGraph], Engine]


def make_stage_graph(setup: Setup, *, replay: bool = False) -> Made:
    """The stage-graph engine, or the one that replays times on the same cut."""
    from rlplace.runtime.distributed.replay import ReplayEngine
    from rlplace.runtime.distributed.stage_graph import StageGraphEngine

    plan, ranks = setup.plan, setup.ranks
    planned, groups = planned_spots(plan), planned_groups(plan)
    assigned = assign(setup.graph, planned, None, groups)
    first = cut_graph(setup.graph, assigned, grain="group")
    own = own_tensors(setup.model, first.owners, setup.graph.constants, ranks.place, ranks.device)
    places = {name: who[0] for name, who in own.owners.items()}
    expected = None if setup.problem is None else expected_of(setup.problem)
    kind = ReplayEngine if replay else StageGraphEngine

    def engine_for(graph: ForwardGraph) -> Engine:
        assignment = assigned if graph is setup.graph else assign(graph, planned, places, groups)
        cut = first if graph is setup.graph else cut_graph(graph, assignment, grain="group")
        buffers = {**own.buffers, **{name: value.to(ranks.device) for name, value in graph.constants.items()}}
        again = recompute_sets(plan.recompute, assignment)
        return kind(cut, ranks, own.parameters, buffers, own.owners, plan.schedule, expected, again, plan.optimizer_sharding)

    return Made("replay" if replay else "stage_graph", own, engine_for)


def make_replay(setup: Setup) -> Made:
    """See `rlplace.runtime.distributed.replay`."""
    if setup.problem is None:
        raise InputError("distribute: replay needs the problem that the plan was made for; give problem=")
    return make_stage_graph(setup, replay=True)


ENGINES: dict[str, Callable[[Setup], Made]] = {"stage_graph": make_stage_graph, "replay": make_replay}


def choose_engine(setup: Setup, name: str | None = None) -> Made:
    """Makes the engine of that name, or the one that fits the plan best.

    Raises:
        InputError: No engine can run the plan, with the reasons.
    """
    if name is not None and name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    return ENGINES[name or "stage_graph"](setup)
