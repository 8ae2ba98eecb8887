"""ParDNN: slicing into paths, mapping by locality and load, and a memory step, for graphs of hundreds of thousands of ops.

Problem: makespan of an op graph on equal devices whose executor chooses the order itself, under a memory limit at every moment.

Paper: Qararyah, Wahib, Dikbayir, Belviranli, Unat, "A computational-graph partitioning method for training memory-constrained
DNNs", Parallel Computing 104-105, 2021 (arXiv 2008.08636).

The paper's: slicing (`slicing`), locality-first load-aware mapping over levels (`mapping`), the two memory heuristics
(`memory`), co-location of variables with what updates them at the end, a reserve of a tenth of the memory. Reconstruction:
what the paper leaves open, each named where it is: the tests of local imbalance, votes of groups (`colocation`), targets of
memory moves, chunks of the longest primary.

Departures: candidates differ in the number of devices and in whether nodes are ops or whole groups, and the simulator chooses
among them. Unlike devices: a node weighs its mean time, a device's load counts its own time, the heaviest primary goes to the
fastest device. Nodes that may not go everywhere stay out of the paths; those with one device only are settled first. The memory
step reads times off the simulator, whose executor goes by priority and lets transfers queue, in place of a FIFO emulator. What
still does not fit goes through the repair that all planners share.

From node clusters to group devices.

ParDNN maps nodes; a plan places groups, whose ops must share a device: a variable and the ops that update it in the paper,
which co-locates them at the end; a forward op, its backward ops, parameters and update in captured models. A group's nodes
vote: each with its time for its own device, and each edge to another group with its transfer time for the device of the other
end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment, PlanEvaluator
from rlplace.placement.common.floor import LARGE_OPS, device_subsets, map_parts
from rlplace.placement.common.repair import legalize
from rlplace.placement.published.pardnn.memory import RESERVE, balance_residents, reduce_peaks
from rlplace.placement.published.pardnn.nodegraph import NodeGraph, folded_graph, op_graph
from rlplace.placement.published.pardnn.slicing import Clusters, bind_groups, cut_long_primary, map_clusters, slice_graph
from rlplace.problem import Problem

WORK_SHARES = (1.0, 2.0, 0.3, 0.1, 0.03, None)
"""Weight of work beside traffic when load is balanced (`rlplace.placement.published.pardnn.slicing.map_clusters`); 1 is the
paper's."""

WORK_SHARES_LARGE = (1.0, 0.1, None)
"""The same for problems of more than `LARGE_OPS` ops."""

RESERVES = (RESERVE, 0.0)
"""Shares of memory that H1 leaves free, the paper's and none: the executor frees what is not needed, nothing is fragmented."""

RELIEVED = 3
"""Assignments that go through the memory step, for every number of devices."""


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields assignments for every number of devices; the quickest that do not fit come again after the memory step."""
    del seed
    limited = bool(np.isfinite(problem.memory_limit_bytes).any())
    evaluator = PlanEvaluator(problem)
    quickest, large = float("inf"), problem.num_ops > LARGE_OPS
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        over: list[tuple[float, int, _Cut, Assignment]] = []
        seen: set[bytes] = set()
        for cut in _cuts(problem, subset, limited):
            if cut.room_bytes is not None and large and quickest < float("inf"):
                continue
            devices = legalize(
                problem, place_clusters(problem, cut.graph, cut.clusters, work_share=cut.work_share, room_bytes=cut.room_bytes)
            )
            if devices.tobytes() in seen:
                continue
            seen.add(devices.tobytes())
            yield devices
            if limited:
                score = evaluator.score(devices)
                if score.feasible:
                    quickest = min(quickest, score.step_time_s)
                else:
                    over.append((score.step_time_s, len(over), cut, devices))
        for step_s, _, cut, devices in sorted(over, key=lambda row: row[:2])[:RELIEVED]:
            if step_s < quickest:
                yield from _relieved(problem, cut, devices, evaluator)


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


@dataclass(frozen=True, eq=False)
class _Cut:
    """One way to cut and map a problem, and the resulting devices of groups."""

    graph: NodeGraph
    clusters: Clusters
    work_share: float | None
    room_bytes: NDArray[np.float64] | None = None


def _cuts(problem: Problem, subset: list[int], limited: bool) -> Iterator[_Cut]:
    """Yields ops that vote at the end (the paper's), ops bound to their group before mapping, whole groups; each with every
    share.
    """
    shares = WORK_SHARES if problem.num_ops <= LARGE_OPS else WORK_SHARES_LARGE
    room = problem.memory_limit_bytes[subset]
    graph = op_graph(problem, subset)
    folded = folded_graph(problem, subset) if problem.num_groups < problem.num_ops else None
    for limit in (None, room) if limited else (None,):
        clusters = slice_graph(graph, room_bytes=limit)
        ways = [(graph, clusters)]
        bound = bind_groups(graph, clusters)
        if bound is not clusters:
            ways.append((graph, bound))
        if folded is not None:
            ways.append((folded, slice_graph(folded, room_bytes=limit)))
        for share in shares:
            for view, cut in ways:
                yield _Cut(view, cut, share, limit)


def _relieved(problem: Problem, cut: _Cut, devices: Assignment, evaluator: PlanEvaluator) -> Iterator[Assignment]:
    """Yields an assignment after the memory step: H1 with each reserve, H2, and H2 after the longest primary was cut."""
    for reserve in RESERVES:
        yield reduce_peaks(problem, devices, evaluator.timeline, reserve=reserve)
    yield balance_residents(problem, devices)
    chunks = cut_long_primary(cut.graph, cut.clusters)
    if chunks is not cut.clusters:
        devices = legalize(problem, place_clusters(problem, cut.graph, chunks, work_share=cut.work_share))
        yield balance_residents(problem, devices)


def group_devices(problem: Problem, graph: NodeGraph, clusters: Clusters, device: NDArray[np.int32]) -> Assignment:
    """Returns int32 [G], device of each group, by the votes of its nodes.

    Args:
        problem: The problem.
        graph: One of the problem's graphs.
        clusters: The graph cut into clusters.
        device: int32 [S], from `rlplace.placement.published.pardnn.slicing.map_clusters`; -1 for clusters that no device in use
            can run.
    """
    node = device[clusters.cluster]
    count, groups = len(graph.devices), problem.num_groups
    votes = np.zeros((groups, count))
    placed = node >= 0
    seconds = graph.time_s[placed, node[placed]]
    np.add.at(votes, (graph.group[placed], node[placed]), seconds)
    source, target = graph.group[graph.source], graph.group[graph.target]
    for here, there, end in ((source, target, graph.target), (target, source, graph.source)):
        counts = (here != there) & (node[end] >= 0)
        np.add.at(votes, (here[counts], node[end][counts]), graph.cost_s[counts])
    # Groups whose nodes agree stay where mapping put them, however much traffic calls them elsewhere.
    low, high = np.full(groups, count, dtype=np.int32), np.full(groups, -1, dtype=np.int32)
    np.minimum.at(low, graph.group[placed], node[placed])
    np.maximum.at(high, graph.group[placed], node[placed])
    used = list(graph.devices)
    votes[~problem.group_allowed[:, used]] = -np.inf
    column = np.where(low == high, low, votes.argmax(axis=1))
    # Groups without nodes, or that can go to none of these devices, go to the first one they may use, the least filled one.
    result = np.array(used, dtype=np.int32)[column]
    lost = np.flatnonzero((high < 0) | ~problem.group_allowed[np.arange(groups), result])
    if len(lost):
        load = np.bincount(
            np.delete(result, lost), weights=np.delete(problem.resident_bytes, lost), minlength=problem.num_devices
        )
        for group in lost:
            result[group] = int(np.where(problem.group_allowed[group], load, np.inf).argmin())
            load[result[group]] += float(problem.resident_bytes[group])
    return result
