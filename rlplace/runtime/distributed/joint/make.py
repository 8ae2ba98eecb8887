"""Joint-graph engines for `rlplace.distribute`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from rlplace.plan.plan import FREE_SCHEDULES, PlacementPlan
from rlplace.runtime.distributed.execution.engine import Engine
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.joint.assign import JointPlaces, joint_places
from rlplace.runtime.distributed.joint.engine import JointEngine
from rlplace.runtime.distributed.joint.graph import joint_graph
from rlplace.runtime.distributed.state.tensors import own_tensors

if TYPE_CHECKING:
    from rlplace.runtime.distributed.execution.engines import Made, Setup


def build_joint(
    source: ForwardGraph, plan: PlacementPlan, device: torch.device, owners: Mapping[str, tuple[int, ...]] | None = None
) -> JointPlaces:
    """Traces the joint graph and puts it on the devices of a plan; nothing is allocated or run.

    Args:
        source: The forward of one micro-batch.
        plan: Names its ops.
        device: Where this process computes; only its kind matters.
        owners: Holders of the tensors that are in place already. Default: chosen by the plan.
    """
    return joint_places(source, joint_graph(source, kind=device.type), plan, owners)


def make_joint(setup: Setup) -> Made:
    """The joint-graph engine for a plan."""
    from rlplace.runtime.distributed.execution.engines import Made

    plan, ranks, source = setup.plan, setup.ranks, setup.graph
    first = build_joint(source, plan, ranks.device)
    own = own_tensors(setup.model, first.owners, source.constants, ranks.place, ranks.device)

    def engine_for(graph: ForwardGraph) -> Engine:
        places = first if graph is source else build_joint(graph, plan, ranks.device, own.owners)
        return JointEngine(places, ranks, own.holding(graph.constants, ranks.device), plan.schedule)

    return Made("joint_graph", own, engine_for)


def why_not(plan: PlacementPlan) -> str | None:
    """Why the joint-graph engine cannot run a plan; None: it can."""
    if plan.shards:
        return f"it cuts no ops, and the plan cuts {len(plan.shards)}; plan without shards"
    if plan.recompute:
        return f"it recomputes nothing, and the plan recomputes {len(plan.recompute)} segments; plan without recompute"
    if plan.schedule not in FREE_SCHEDULES:
        return f"schedule {plan.schedule} is for chains of stages; use list, gpipe or 1f1b"
    return None
