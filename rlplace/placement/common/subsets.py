"""Choice and order of the devices to use, and assignment of parts to them.

Leaving devices unused is often best when links are slow, so that every constructive planner builds one candidate per number of
devices. Fast and well connected devices come first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common import kernels
from rlplace.placement.common.groupgraph import finite_links, finite_mean, group_graph
from rlplace.problem import Problem

MAX_COUNTS = 12
"""Device counts tried when there are more devices than this."""

MAX_COUNTS_LARGE = 4
"""The same for problems of more than `LARGE_OPS` ops, where every candidate takes a tenth of a second."""

LARGE_OPS = 30_000


def device_classes(problem: Problem, among: Sequence[int] | None = None) -> list[list[int]]:
    """Classes of devices, of all or of some, with equal op times, equal memory and the same allowed groups."""
    graph = group_graph(problem)
    classes: dict[tuple[bytes, float], list[int]] = {}
    for device in range(problem.num_devices) if among is None else among:
        key = (graph.time_s[:, device].tobytes(), float(problem.memory_limit_bytes[device]))
        classes.setdefault(key, []).append(device)
    return list(classes.values())


def device_order(problem: Problem) -> list[int]:
    """All devices in greedy order: the next one is the fastest for its links to those before it.

    Speed is the mean group time on the device; links count with the mean traffic of a group.
    """
    graph = group_graph(problem)
    runs = np.isfinite(graph.time_s).sum(axis=0)
    mean_s = finite_mean(graph.time_s, axis=0)
    # A device that runs few groups is a poor choice however fast it runs them.
    mean_s = mean_s + graph.mean_time_s.mean() * 10.0 * (1.0 - runs / max(problem.num_groups, 1))
    latency, inverse = finite_links(problem)
    edge = graph.edge_bytes.mean() if len(graph.edge_bytes) else 0.0
    link_s = latency + latency.T + edge * (inverse + inverse.T)
    chosen = [int(mean_s.argmin())]
    rest = [d for d in range(problem.num_devices) if d != chosen[0]]
    while rest:
        cost = [float(mean_s[d]) + float(link_s[d, chosen].mean()) for d in rest]
        chosen.append(rest.pop(int(np.argmin(cost))))
    return chosen


def device_subsets(problem: Problem, *, least: int = 1) -> list[list[int]]:
    """Prefixes of `device_order` by increasing length, at most `MAX_COUNTS` of them, the full set always included."""
    order = device_order(problem)
    count = len(order)
    most = MAX_COUNTS if problem.num_ops <= LARGE_OPS else MAX_COUNTS_LARGE
    if count <= most:
        sizes = range(least, count + 1)
        return [order[:size] for size in sizes]
    spread = np.unique(np.round(np.geomspace(max(least, 1), count, most)).astype(int))
    return [order[: int(size)] for size in spread]


def map_parts(problem: Problem, part_of_group: NDArray[np.int32], devices: Sequence[int]) -> NDArray[np.int32]:
    """Places part p on a device of `devices`, and swaps parts between devices while that lowers load and traffic.

    Args:
        problem: The problem.
        part_of_group: int32 [G], part numbers below ``len(devices)``.
        devices: Device of each part to start from.

    Returns:
        int32 [G], device of every group.
    """
    where = np.array(devices, dtype=np.int64)
    parts = len(where)
    graph = group_graph(problem)
    latency, inverse = finite_links(problem)
    off = ~np.eye(len(latency), dtype=bool)
    like = np.ptp(graph.time_s, axis=1) == 0 if np.isfinite(graph.time_s).all() else np.zeros(1, dtype=bool)
    if parts > 1 and not (np.ptp(inverse[off]) == 0 and np.ptp(latency[off]) == 0 and like.all()):
        source, target = part_of_group[graph.source], part_of_group[graph.target]
        cross = source != target
        size, count, load = np.zeros((parts, parts)), np.zeros((parts, parts)), np.zeros((parts, problem.num_devices))
        np.add.at(size, (source[cross], target[cross]), graph.edge_bytes[cross])
        np.add.at(count, (source[cross], target[cross]), graph.edge_count[cross])
        barred_s = 1e3 * graph.mean_time_s[:, None] + 1.0
        np.add.at(load, part_of_group, np.where(np.isfinite(graph.time_s), graph.time_s, barred_s))
        kernels.swap_parts(where, size, count, load, latency, inverse, 3)
    return where.astype(np.int32)[part_of_group]
