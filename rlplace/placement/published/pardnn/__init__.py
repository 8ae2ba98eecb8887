"""ParDNN: slicing into paths, and mapping by locality and load, for graphs of hundreds of thousands of ops.

Problem: makespan of an op graph on equal devices whose executor chooses the order itself, under a memory limit at every moment.

Paper: Qararyah, Wahib, Dikbayir, Belviranli, Unat, "A computational-graph partitioning method for training memory-constrained
DNNs", Parallel Computing 104-105, 2021 (arXiv 2008.08636).

The paper's: slicing (`slicing`), locality-first load-aware mapping over levels (`mapping`), co-location of variables with what
updates them at the end. Reconstruction of what the paper leaves open: the tests of local imbalance and the votes of groups
(`mapping`).

Departures: candidates differ in the number of devices, in whether nodes are ops or whole groups and in whether mapping keeps to
footprints, and the simulator chooses among them. Unlike devices: a node weighs its mean time, a device's load counts its own
time, the heaviest primary goes to the fastest device. Nodes that may not go everywhere stay out of the paths; those with one
device only are settled first. What does not fit goes through the repair that all planners share, in place of the paper's memory
heuristics (benchmarks/papers/pardnn.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import LARGE_OPS, device_subsets, map_parts, one_shot_planner
from rlplace.placement.published.pardnn.mapping import group_devices, map_clusters
from rlplace.placement.published.pardnn.nodegraph import NodeGraph, folded_graph, op_graph
from rlplace.placement.published.pardnn.slicing import Clusters, bind_groups, slice_graph
from rlplace.problem import Problem

WORK_SHARES = (1.0, 2.0, 0.3, 0.1, 0.03, None)
"""Weight of work beside traffic when load is balanced (`rlplace.placement.published.pardnn.mapping.map_clusters`); 1 is the
paper's."""

WORK_SHARES_LARGE = (1.0, 0.1, None)
"""The same for problems of more than `LARGE_OPS` ops."""

REPAIRED = 8
"""Candidates that do not fit and are repaired: mappings know nothing of memory over time."""


@one_shot_planner("pardnn", repairs=REPAIRED)
def pardnn(problem: Problem, seed: int) -> Iterator[Assignment | None]:
    """Yields mappings for every number of devices: of ops that vote at the end (the paper's), of ops bound to their group
    before mapping, and of whole groups; each with every share.
    """
    del seed
    limited = bool(np.isfinite(problem.memory_limit_bytes).any())
    shares = WORK_SHARES if problem.num_ops <= LARGE_OPS else WORK_SHARES_LARGE
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        graph = op_graph(problem, subset)
        folded = folded_graph(problem, subset) if problem.num_groups < problem.num_ops else None
        yield None
        for room in (None, problem.memory_limit_bytes[subset]) if limited else (None,):
            clusters = slice_graph(graph, room_bytes=room)
            ways = [(graph, clusters)]
            bound = bind_groups(graph, clusters)
            if bound is not clusters:
                ways.append((graph, bound))
            if folded is not None:
                ways.append((folded, slice_graph(folded, room_bytes=room)))
            yield None
            for share in shares:
                for view, cut in ways:
                    yield place_clusters(problem, view, cut, work_share=share, room_bytes=room)


def place_clusters(
    problem: Problem,
    graph: NodeGraph,
    clusters: Clusters,
    *,
    work_share: float | None = 1.0,
    room_bytes: NDArray[np.float64] | None = None,
) -> Assignment:
    """Returns int32 [G], devices of the problem: mapped clusters, co-located groups, and parts swapped where links or speeds
    differ.
    """
    mapping = map_clusters(graph, clusters, work_share=work_share, room_bytes=room_bytes)
    devices = group_devices(problem, graph, clusters, mapping)
    used = np.array(graph.devices)
    if not np.isin(devices, used).all():
        return devices
    part = np.empty(problem.num_devices, dtype=np.int32)
    part[used] = np.arange(len(used))
    return map_parts(problem, part[devices], graph.devices)
