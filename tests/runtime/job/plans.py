"""Plans for tests: a model's graph cut into groups, and the groups dealt to devices."""

from __future__ import annotations

import random

import numpy as np

from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.placement.forward_graph import forward_graph


def plan_of(model, inputs, devices, *, loss=None, target=None, groups=6, deal="random", seed=0, graph=None, **fields):
    """A plan of consecutive groups of ops.

    Args:
        model: Its graph is traced.
        inputs: Keyword inputs.
        devices: Devices of one replica.
        loss, target: As in `forward_graph`.
        groups: How many; None is one per op.
        deal: "random", "chain" (equal runs of groups, in order) or a list with the device of each group.
        seed: Of the random deal.
        graph: Traced before.
        fields: Of the plan.
    """
    graph = graph or forward_graph(model, (), inputs, loss=loss, target=target)
    ops = list(graph.op_of_node.values())
    count = len(ops) if groups is None else groups
    edges = [len(ops) * number // count for number in range(count + 1)]
    rows = [{"name": f"g{i}", "modules": [], "ops": ops[edges[i] : edges[i + 1]]} for i in range(count)]
    generator = random.Random(seed)
    if deal == "random":
        dealt = [generator.randrange(devices) for _ in range(count)]
    elif deal == "chain":
        dealt = [number * devices // count for number in range(count)]
    else:
        dealt = list(deal)
    return PlacementPlan(
        problem="0" * 64, planner="test", seed=0, device_of_group=np.array(dealt, dtype=np.int32), groups=rows, **fields
    )
