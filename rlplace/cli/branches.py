"""Models with parallel branches: a placement of one micro-batch may be quicker than every strategy."""

from __future__ import annotations

import argparse

import numpy as np

from rlplace.cli.common import Captured, pricing, say
from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError
from rlplace.graph.opgraph import UPDATE, OpGraph
from rlplace.placements import Placed, Priced, place_priced
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.rivals import rivals_of
from rlplace.strategy.kinds import KINDS

FLOPS_PER_S, BYTES_PER_S = 1e14, 1e12
"""Of a device, to weigh ops against each other."""


def quicker_placement(plan: PlacementPlan, captured: Captured, machine: Cluster, options: argparse.Namespace) -> Placed | None:
    """A placement of the whole batch as one micro-batch that is quicker than a strategy; None where there is none.

    It is asked for only where branches could make it so: ops that depend on each other take less than the strategy's step. One
    device must have room, whose step says what all ops take.

    Args:
        plan: The strategy.
        captured: The model.
        machine: The cluster.
        options: Of ``rlplace place``.
    """
    assert plan.strategy is not None
    step_s = plan.predicted.step_s
    alone_s = next((rival.step_time_s for rival in rivals_of(plan.predicted) if rival.kind == KINDS[0]), None)
    if machine.num_devices == 1 or alone_s is None or longest_share(captured.graph) * alone_s >= step_s:
        return None
    batch = plan.strategy.batch
    say(f"the model has branches; placing them, too, with {batch} samples a micro-batch")
    priced = Priced.model(captured.capture_at(batch), captured.capture_at, machine, **pricing(options))
    try:
        placed = place_priced(priced, planner="best", seed=options.seed, time_limit_s=options.time_limit)
    except InfeasibleError:
        return None
    finest = placed.plan.predicted.op_level or placed.plan.predicted
    return placed if finest.feasible and finest.step_s < step_s else None


def longest_share(graph: OpGraph) -> float:
    """Of what all ops but updates take, the part of those on the longest path."""
    seconds = np.where(graph.op_phase == UPDATE, 0.0, graph.op_flops / FLOPS_PER_S + graph.op_bytes / BYTES_PER_S)
    maker, reader = graph.tensor_producer[graph.edge_tensor], graph.consumers
    inside = maker >= 0
    order = np.argsort(reader[inside], kind="stable")  # ops are listed after what they depend on
    ends, own = seconds.tolist(), seconds.tolist()
    for source, op in zip(maker[inside][order].tolist(), reader[inside][order].tolist(), strict=True):
        ends[op] = max(ends[op], ends[source] + own[op])
    return max(ends, default=0.0) / max(float(seconds.sum()), 1e-30)
