"""What the sharded engine cannot run, said before anything is started."""

from __future__ import annotations

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.ranks import devices_of
from rlplace.runtime.distributed.sharded.mesh import factor_mesh
from rlplace.runtime.distributed.sharded.spaces import spaces_of, why_not_shards
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
