"""ParDNN: slicing into paths, mapping by locality and load, and a memory step, for graphs of hundreds of thousands of ops.

Problem: makespan of an op graph on equal devices whose executor chooses the order itself, under a memory limit at every moment.

Paper: Qararyah, Wahib, Dikbayir, Belviranli, Unat, "A computational-graph partitioning method for training memory-constrained
DNNs", Parallel Computing 104-105, 2021 (arXiv 2008.08636).

The paper's: slicing (`slicing`), locality-first load-aware mapping over levels (`mapping`), the two memory heuristics
(`memory`), co-location of variables with what updates them at the end, a reserve of a tenth of the memory. Reconstruction:
what the paper leaves open, each named where it is: the tests of local imbalance, votes of groups (`mapping`), targets of
memory moves, chunks of the longest primary.

Departures: candidates differ in the number of devices and in whether nodes are ops or whole groups, and the simulator chooses
among them. Unlike devices: a node weighs its mean time, a device's load counts its own time, the heaviest primary goes to the
fastest device. Nodes that may not go everywhere stay out of the paths; those with one device only are settled first. The memory
step reads times off the simulator, whose executor follows priorities and lets transfers queue, in place of a FIFO emulator.
What still does not fit goes through the repair that all planners share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment, PlanEvaluator
from rlplace.placement.common.floor import LARGE_OPS, device_subsets, map_parts, one_shot_planner
from rlplace.placement.common.repair import legalize
from rlplace.placement.published.pardnn.mapping import group_devices, map_clusters
from rlplace.placement.published.pardnn.memory import RESERVE, balance_residents, reduce_peaks
from rlplace.placement.published.pardnn.nodegraph import NodeGraph, folded_graph, op_graph
from rlplace.placement.published.pardnn.slicing import Clusters, bind_groups, cut_long_primary, slice_graph
from rlplace.problem import Problem

WORK_SHARES = (1.0, 2.0, 0.3, 0.1, 0.03, None)
"""Weight of work beside traffic when load is balanced (`rlplace.placement.published.pardnn.mapping.map_clusters`); 1 is the
paper's."""

WORK_SHARES_LARGE = (1.0, 0.1, None)
"""The same for problems of more than `LARGE_OPS` ops."""

RESERVES = (RESERVE, 0.0)
"""Shares of memory that H1 leaves free, the paper's and none: the executor frees what is not needed, nothing is fragmented."""

RELIEVED = 3
"""Assignments that go through the memory step, for every number of devices."""


@one_shot_planner("pardnn")
def pardnn(problem: Problem, seed: int) -> Iterator[Assignment]:
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
