"""Which engine runs a placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from rlplace.errors import InputError, unknown_name
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.check import backward_elsewhere
from rlplace.runtime.distributed.execution.engine import Engine
from rlplace.runtime.distributed.execution.replay import ReplayEngine
from rlplace.runtime.distributed.execution.stage_graph import StageGraphEngine
from rlplace.runtime.distributed.graph.assign import assign, planned_groups, planned_placements
from rlplace.runtime.distributed.graph.cut import cut_graph
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.order import expected_of
from rlplace.runtime.distributed.joint.assign import JointPlacement, place_joint_graph
from rlplace.runtime.distributed.joint.engine import JointEngine
from rlplace.runtime.distributed.joint.graph import joint_graph
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own, own_tensors

STAGE_GRAPH, JOINT_GRAPH, REPLAY = "stage_graph", "joint_graph", "replay"
ENGINES = (STAGE_GRAPH, JOINT_GRAPH, REPLAY)
"""Names; `REPLAY` has to be asked for."""


@dataclass(frozen=True, eq=False)
class ChosenEngine:
    """An engine chosen for a plan.

    Attributes:
        name: The engine's name.
        own: What this process holds.
        engine_for: Makes the engine for the graph of one signature of inputs; does not hold on to the whole model.
    """

    name: str
    own: Own
    engine_for: Callable[[ForwardGraph], Engine]


def choose_engine(
    model: nn.Module,
    plan: PlacementPlan,
    graph: ForwardGraph,
    ranks: Ranks,
    *,
    problem: Problem | None = None,
    replayed: Problem | None = None,
    name: str | None = None,
) -> ChosenEngine:
    """Makes the engine of that name, or the one that fits: segments, unless backward ops run elsewhere than their forward ops.

    Args:
        model: The whole model, with values.
        plan: The plan.
        graph: Its forward graph for the example inputs.
        ranks: The processes.
        problem: What the plan was made for, where the caller has it.
        replayed: The problem whose times a replay sleeps; None: `problem`.
        name: One of `ENGINES`.

    Raises:
        InputError: There is no such engine, or it cannot run the plan.
    """
    moved = backward_elsewhere(plan)
    if name is None:
        name = STAGE_GRAPH if moved is None else JOINT_GRAPH
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if moved is not None and name != JOINT_GRAPH:
        raise InputError(
            f"distribute: engine {name} leaves backward to autograd, which runs it where the forward ran, but the plan moves "
            f"{moved!r}; the engine joint_graph runs it"
        )
    if name == JOINT_GRAPH:
        return _joint(model, plan, graph, ranks)
    make = StageGraphEngine
    if name == REPLAY:
        if problem is None:
            raise InputError("distribute: replay needs the problem that the plan was made for; give problem=")
        make = partial(ReplayEngine, expected_of(problem if replayed is None else replayed))  # type: ignore[assignment]
    planned, groups = planned_placements(plan), planned_groups(plan)
    first = cut_graph(graph, assign(graph, planned, None, groups))
    own = own_tensors(model, first.owners, graph.constants, ranks.plan_device, ranks.device)
    first_owner = {name: who[0] for name, who in own.owners.items()}
    expected = None if problem is None else expected_of(problem)

    def engine_for(other: ForwardGraph) -> Engine:
        cut = first if other is graph else cut_graph(other, assign(other, planned, first_owner, groups))
        return make(cut, ranks, own.holding(other.constants, ranks.device), plan.schedule, expected)

    return ChosenEngine(name, own, engine_for)


def _joint(model: nn.Module, plan: PlacementPlan, graph: ForwardGraph, ranks: Ranks) -> ChosenEngine:
    first = build_joint(graph, plan, ranks.device)
    own = own_tensors(model, first.owners, graph.constants, ranks.plan_device, ranks.device)

    def engine_for(other: ForwardGraph) -> Engine:
        placement = first if other is graph else build_joint(other, plan, ranks.device, own.owners)
        return JointEngine(placement, ranks, own.holding(other.constants, ranks.device), plan.schedule)

    return ChosenEngine(JOINT_GRAPH, own, engine_for)


def build_joint(
    source: ForwardGraph, plan: PlacementPlan, device: torch.device, owners: Mapping[str, tuple[int, ...]] | None = None
) -> JointPlacement:
    """Traces the joint graph and puts it on the devices of a plan; nothing is allocated or run.

    Args:
        source: The forward of one micro-batch.
        plan: Names its ops.
        device: Where this process computes; only its kind matters.
        owners: Holders of the tensors that are in place already. Default: chosen by the plan.
    """
    return place_joint_graph(source, joint_graph(source, kind=device.type), plan, owners)
