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
step reads times off the simulator, whose executor goes by priority, instead of the FIFO emulator (option `executor`). What
still does not fit goes through the repair that all planners share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlplace.errors import unknown_name
from rlplace.plan import PlacementPlan
from rlplace.planners.evaluate import Assignment, Evaluator
from rlplace.planners.floor import one_shot
from rlplace.planners.pardnn.colocation import group_devices
from rlplace.planners.pardnn.emulator import Run, fifo, listed
from rlplace.planners.pardnn.mapping import map_clusters
from rlplace.planners.pardnn.memory import balance_residents, reduce_peaks
from rlplace.planners.pardnn.nodegraph import NodeGraph, folded_graph, op_graph
from rlplace.planners.pardnn.slicing import Clusters, cut_long_primary, slice_graph
from rlplace.planners.repair import legalize
from rlplace.planners.subsets import device_subsets, map_parts
from rlplace.problem import Problem

MEMORY = ("h1", "h2", "both", "none")
EXECUTORS = ("list", "fifo")


def pardnn(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    memory: str = "both",
    executor: str = "list",
    **execution: Any,
) -> PlacementPlan:
    """The best of ParDNN's assignments; see the module docstring.

    Args:
        problem: The problem.
        seed: Not used; the method is deterministic.
        time_limit_s: Seconds.
        memory: Memory step for assignments that do not fit: ``"h1"``, ``"h2"``, ``"both"`` or ``"none"``.
        executor: Whose times H1 sweeps: ``"list"`` (the simulator) or ``"fifo"`` (the paper's emulator).
        **execution: Fields of `rlplace.planners.evaluate.Execution`.
    """
    if memory not in MEMORY:
        raise unknown_name("memory step", memory, MEMORY)
    if executor not in EXECUTORS:
        raise unknown_name("executor", executor, EXECUTORS)

    def build(found: Problem, number: int) -> Iterator[Assignment]:
        return candidates(found, number, memory=memory, executor=executor)

    return one_shot(problem, "pardnn", build, seed=seed, time_limit_s=time_limit_s, **execution)


def candidates(problem: Problem, seed: int, *, memory: str = "both", executor: str = "list") -> Iterator[Assignment]:
    """Assignments for every number of devices, by ops and by groups, each also after the memory step if it does not fit."""
    del seed
    limited = bool(np.isfinite(problem.memory_limit_bytes).any()) and memory != "none"
    evaluator = Evaluator(problem)
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        for graph in _graphs(problem, subset):
            clusters = slice_graph(graph)
            devices = legalize(problem, place_clusters(problem, graph, clusters))
            yield devices
            if not limited:
                continue
            line = evaluator.timeline(devices)
            if line.feasible or line.step_time_s is None:
                continue
            if memory in ("h2", "both"):
                yield balance_residents(problem, devices)
                cut = cut_long_primary(graph, clusters)
                if cut is not clusters:
                    yield balance_residents(problem, legalize(problem, place_clusters(problem, graph, cut)))
            if memory in ("h1", "both"):

                def run_of(found: Assignment) -> Run:
                    if executor == "fifo":
                        return fifo(problem, found)
                    return listed(evaluator.timeline(found))

                yield reduce_peaks(problem, devices, run_of).devices


def place_clusters(problem: Problem, graph: NodeGraph, clusters: Clusters) -> Assignment:
    """int32 [G], devices of the problem: mapped clusters, co-located groups, and parts swapped where links or speeds differ."""
    mapping = map_clusters(graph, clusters)
    devices = group_devices(problem, graph, clusters, mapping.device)
    used = np.array(graph.devices)
    if not np.isin(devices, used).all():
        return devices
    part = np.empty(problem.num_devices, dtype=np.int32)
    part[used] = np.arange(len(used))
    return map_parts(problem, part[devices], graph.devices)


def _graphs(problem: Problem, subset: list[int]) -> Iterator[NodeGraph]:
    yield op_graph(problem, subset)
    if problem.num_groups < problem.num_ops:
        yield folded_graph(problem, subset)
