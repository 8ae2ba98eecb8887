"""Rivals of the partition's objective: least traffic alone, equal loads alone, and the cut as METIS counts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.published.compiler import LARGE_GROUPS, Partitioner, balances, family
from rlplace.placement.published.compiler.nets import Nets
from rlplace.problem import Problem

OBJECTIVES = ("combined", "cut", "balance")
"""Least traffic under balance; least traffic whatever the loads; equal loads whatever the traffic."""


def partitions(problem: Problem, devices: Sequence[int], objective: str) -> Iterator[Assignment]:
    """Yields the planner's partitions on given devices, or those of another objective with the same bands and imbalances."""
    if objective == "combined":
        yield from family(problem, devices)
        return
    starts = 0 if problem.num_groups > LARGE_GROUPS else 2
    for bands, eps in balances(problem.num_groups, len(devices)):
        partitioner = Partitioner(problem, list(devices), eps, bands, grown=starts)
        if objective == "balance":
            yield partitioner.partition_of(partitioner.legal(longest_first(partitioner))).device_of_group
        else:
            partitioner.limit[:] = np.inf
            yield partitioner.best(np.random.default_rng(0)).device_of_group


def longest_first(partitioner: Partitioner) -> NDArray[np.int32]:
    """Places longest first, each on the device with memory for it that then has the least load in its band: int32 [G]."""
    level = partitioner.level
    load, used = np.zeros(partitioner.limit.shape), np.zeros(len(partitioner.row))
    part = np.zeros(len(level.band), dtype=np.int32)
    total = np.where(np.isfinite(level.time_s), level.time_s, 0.0).sum(axis=1)
    for vertex in np.argsort(-total, kind="stable"):
        after = load[:, level.band[vertex]] + level.time_s[vertex]
        full = used + level.footprint_bytes[vertex] > partitioner.room
        device = part[vertex] = np.lexsort((after, full, np.isinf(after)))[0]
        load[device, level.band[vertex]] = after[device]
        used[device] += level.footprint_bytes[vertex]
    return part


def edge_nets(problem: Problem, link: tuple[float, float]) -> Nets:
    """Makes a net of every edge of the group graph, worth its seconds on a link of that latency and seconds per byte."""
    graph = group_graph(problem)
    seconds, zero = graph.edge_s(*link), np.zeros(len(graph.source))
    return Nets(graph.source, np.arange(len(zero) + 1, dtype=np.int64), graph.target, zero, zero.copy(), seconds)
