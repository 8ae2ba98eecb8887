"""Joint-graph engines for `rlplace.distribute`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.execution.engine import ChosenEngine, Engine, Setup
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.joint.assign import JointPlacement, place_joint_graph
from rlplace.runtime.distributed.joint.engine import JointEngine
from rlplace.runtime.distributed.joint.graph import joint_graph
from rlplace.runtime.distributed.state.tensors import own_tensors


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


def make(setup: Setup) -> ChosenEngine:
    """The joint-graph engine for a plan."""
    plan, ranks, source = setup.plan, setup.ranks, setup.graph
    first = build_joint(source, plan, ranks.device)
    own = own_tensors(setup.model, first.owners, source.constants, ranks.plan_device, ranks.device)

    def engine_for(graph: ForwardGraph) -> Engine:
        placement = first if graph is source else build_joint(graph, plan, ranks.device, own.owners)
        return JointEngine(placement, ranks, own.holding(graph.constants, ranks.device), plan.schedule)

    return ChosenEngine("joint_graph", own, engine_for)
