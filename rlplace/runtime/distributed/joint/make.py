"""Joint-graph engines for `rlplace.distribute`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlplace.errors import InputError
from rlplace.plan.plan import FREE_SCHEDULES, PlacementPlan
from rlplace.runtime.distributed.engine import Engine
from rlplace.runtime.distributed.engines import Made, Setup
from rlplace.runtime.distributed.forward_graph import ForwardGraph
from rlplace.runtime.distributed.joint.assign import joint_places
from rlplace.runtime.distributed.joint.engine import JointEngine
from rlplace.runtime.distributed.joint.graph import JointGraph, joint_graph
from rlplace.runtime.distributed.tensors import meta_copy, own_tensors


def why_not(plan: PlacementPlan) -> str | None:
    """Why the joint-graph engine cannot run a plan; None: it can."""
    if plan.recompute:
        return "it keeps what the backward reads on whatever device makes it, and recomputes nothing; plan without recompute"
    if plan.optimizer_sharding:
        return "every replica updates all of its weights; plan without optimizer_sharding"
    if plan.schedule not in FREE_SCHEDULES:
        return f"schedule {plan.schedule} is for chains of stages; use list, gpipe or 1f1b"
    return None


def make_joint(setup: Setup) -> Made:
    """The joint-graph engine.

    Raises:
        InputError: It cannot run the plan, with the reason.
    """
    plan, ranks = setup.plan, setup.ranks
    reason = why_not(plan)
    if reason is not None:
        raise InputError(f"distribute: the joint-graph engine cannot run this plan: {reason}")
    source, shapes = setup.graph, meta_copy(setup.model)
    held = {**dict(shapes.named_parameters()), **dict(shapes.named_buffers())}
    first = joint_places(source, _traced(source, held, ranks.device), plan)
    own = own_tensors(setup.model, first.owners, source.constants, ranks.place, ranks.device)

    def engine_for(graph: ForwardGraph) -> Engine:
        places = first if graph is source else joint_places(graph, _traced(graph, held, ranks.device), plan, own.owners)
        return JointEngine(places, ranks, own.parameters, own.buffers, own.owners, plan.schedule)

    return Made("joint_graph", own, engine_for)


def _traced(graph: ForwardGraph, held: Mapping[str, torch.Tensor], device: torch.device) -> JointGraph:
    tensors = {name: held[name] if name in held else graph.constants[name] for name in graph.held}
    return joint_graph(graph, tensors, graph.examples, kind=device.type)
