"""Models with parallel branches: a placement of one micro-batch may be quicker than every strategy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError
from rlplace.model.graph.opgraph import UPDATE, OpGraph
from rlplace.placement.ask import Placed, Priced, place_priced
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import rivals_of
from rlplace.strategy.drafts import KINDS
from rlplace.strategy.search.op_level import NEAR as NO_GAIN

FLOPS_PER_S, BYTES_PER_S = 1e14, 1e12
"""Rates of a device, to weigh ops against each other."""

NEAR = 1.1
"""A placement that takes so many times as long as the strategy is worth a search."""


def quicker_placement(
    plan: PlacementPlan,
    graph: OpGraph,
    capture_at: Callable[[int], OpGraph] | None,
    cluster: Cluster,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    calls: int | None = None,
    **pricing: Any,
) -> Placed | None:
    """Returns a placement of the whole batch as one micro-batch that is quicker than a strategy by more than 1 %, else None.

    It is searched only where branches could make it quicker: the longest chain of ops takes less than the strategy's step.
    The model must fit on one device, whose step gives the time of all ops. Where the best one-shot placement comes near the
    strategy, the agent refines it, and `bipartition` places backward passes apart.

    Args:
        plan: The strategy.
        graph: The model, captured.
        capture_at: Captures the model with a number of samples; None: only the graph's own batch has a placement.
        cluster: The devices.
        seed: Seed of the planners.
        time_limit_s: Seconds for each of the three.
        calls: Simulations of the agent at most.
        **pricing: Arguments of `rlplace.price`.
    """
    assert plan.strategy is not None
    step_s, batch = plan.predicted.step_s, plan.strategy.batch
    alone_s = next((rival.step_time_s for rival in rivals_of(plan.predicted) if rival.kind == KINDS[0]), None)
    if cluster.num_devices == 1 or alone_s is None or longest_share(graph) * alone_s >= step_s:
        return None
    if graph.samples != batch:
        if capture_at is None:
            return None
        graph = capture_at(batch)
    priced = Priced.of(graph, cluster, **pricing)
    found: list[Placed] = []

    def ask(planner: str, **budget: int) -> None:
        with contextlib.suppress(InfeasibleError):
            found.append(place_priced(priced, planner=planner, seed=seed, time_limit_s=time_limit_s, **budget))

    ask("best")
    if found and _step_s(found[0]) < NEAR * step_s:
        ask("agent", **({} if calls is None else {"calls": calls}))
        ask("bipartition")
    placed = min(found, key=_step_s, default=None)
    return placed if placed is not None and NO_GAIN * _step_s(placed) < step_s else None


def _step_s(placed: Placed) -> float:
    """Returns seconds of the plan op by op; inf where it does not fit."""
    finest = placed.plan.predicted.op_level or placed.plan.predicted
    return finest.step_s if finest.feasible else math.inf


def longest_share(graph: OpGraph) -> float:
    """Returns the share of the longest path in the time of all ops without updates."""
    seconds = np.where(graph.op_phase == UPDATE, 0.0, graph.op_flops / FLOPS_PER_S + graph.op_bytes / BYTES_PER_S)
    maker, reader = graph.tensor_producer[graph.edge_tensor], graph.consumers
    inside = maker >= 0
    order = np.argsort(reader[inside], kind="stable")  # ops are listed after what they depend on
    ends, own = seconds.tolist(), seconds.tolist()
    for source, op in zip(maker[inside][order].tolist(), reader[inside][order].tolist(), strict=True):
        ends[op] = max(ends[op], ends[source] + own[op])
    return max(ends, default=0.0) / max(float(seconds.sum()), 1e-30)
