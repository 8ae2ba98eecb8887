"""Sharded engines for `rlplace.distribute`."""

from __future__ import annotations

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.execution.engine import Engine
from rlplace.runtime.distributed.execution.setup import ChosenEngine, Setup
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.ranks import devices_of
from rlplace.runtime.distributed.sharded.engine import ShardedEngine
from rlplace.runtime.distributed.sharded.mesh import factor_mesh
from rlplace.runtime.distributed.sharded.spaces import spaces_of, why_not_shards
from rlplace.runtime.distributed.state.tensors import Own
from rlplace.schedule import LIST


def why_not(plan: PlacementPlan, graph: ForwardGraph, processes: int) -> str | None:
    """Why the sharded engine cannot run a plan with so many processes; None when it can.

    Args:
        plan: With shards.
        graph: The forward of its model for the inputs that it was made for.
        processes: Number of processes of the job.
    """
    if not plan.shards:
        return "the plan cuts no op; the stage-graph engine runs it"
    for what, given in (
        ("replicas", plan.replicas is not None),
        ("recompute", bool(plan.recompute)),
        ("optimizer_sharding", plan.optimizer_sharding),
        (f"schedule {plan.schedule!r}", plan.schedule != LIST),
        ("stage_of_group", plan.stage_of_group is not None),
    ):
        if given:
            return f"shards and {what} exclude each other; leave one of them out"
    needed = devices_of(plan)
    if processes != needed:
        return f"the plan uses {needed} devices, but there are {processes} processes; start {needed}"
    unknown = why_not_shards(plan.shards, graph, spaces_of(graph))
    if unknown is not None:
        return unknown
    try:
        factor_mesh(plan.shards, processes)
    except InputError as error:
        return str(error).removeprefix("distribute: ")
    return None


__all__ = ["make", "why_not"]


def make(setup: Setup) -> ChosenEngine:
    """The engine of a plan with shards.

    Every process must have been given the same model values: each keeps its pieces without asking the others.
    """
    plan, ranks, source = setup.plan, setup.ranks, setup.graph
    state: dict[str, torch.Tensor] = {}
    for name, tensor in [*setup.model.named_parameters(), *setup.model.named_buffers()]:
        if isinstance(tensor, nn.Parameter):
            state[name] = tensor  # cut where it is, so that the device never holds it whole
        else:
            state[name] = torch.empty_like(tensor, device=ranks.device) if tensor.is_meta else tensor.detach().to(ranks.device)
    first = ShardedEngine(setup.graph, plan, state, ranks.device)
    parameters, buffers = dict(first.parameters), dict(first.buffers)
    for name, tensor in state.items():
        if isinstance(tensor, nn.Parameter) and name not in parameters:  # nobody reads it
            value = torch.empty_like(tensor, device=ranks.device) if tensor.is_meta else tensor.detach().to(ranks.device)
            parameters[name] = nn.Parameter(value, tensor.requires_grad)
        elif not isinstance(tensor, nn.Parameter):
            buffers.setdefault(name, tensor)
    everywhere = tuple(range(ranks.world))

    def engine_for(graph: ForwardGraph) -> Engine:
        if graph is source:
            return first
        return ShardedEngine(graph, plan, {**parameters, **buffers}, ranks.device, first.mesh)

    return ChosenEngine("sharded", Own(parameters, buffers, dict.fromkeys(state, everywhere)), engine_for)
