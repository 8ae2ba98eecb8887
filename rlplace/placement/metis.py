"""METIS: balanced minimum cut of the group graph.

Problem: k parts of equal work with the least traffic between them. Vertices are groups weighted with time (or with bytes, or
with both mixed), edges are weighted with transfer seconds in both directions. Parts go to devices by speed and are then swapped
while that lowers load and traffic over the real links.

Paper: Karypis, Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs", SIAM Journal on Scientific
Computing 20(1), 1998; used as a placer's baseline since Mirhoseini et al., "Device placement optimization with reinforcement
learning", ICML 2017.

Departures: METIS knows neither direction nor time nor unlike times per group, so candidates differ in the number of parts, the
vertex weight and the allowed imbalance, and the simulator picks; part sizes follow device speeds (or memory, where bytes are
balanced). The Python binding has one weight per vertex, so memory is a candidate's weight, not a second constraint; the shared
repair does the rest.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_subsets, map_parts, one_shot_planner
from rlplace.placement.common.groupgraph import group_graph, mean_link
from rlplace.problem import Problem
from rlplace.problem.contract import merged_edges
from rlplace.problem.order import grouped

IMBALANCES = (50, 300)
"""Allowed overweight of a part in thousandths; METIS's own default of 1 to 30 leaves it no freedom on few, unlike groups."""


@one_shot_planner("metis")
def metis(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields partitions for every number of parts, vertex weight and imbalance; see the module docstring."""
    graph = group_graph(problem)
    time = graph.mean_time_s / max(float(graph.mean_time_s.sum()), 1e-30)
    size = graph.footprint_bytes / max(float(graph.footprint_bytes.sum()), 1.0)
    limits = np.maximum(problem.memory_limit_bytes, 1.0)
    weights = [(time, True)]
    if np.isfinite(limits).all() and limits.sum() < 2.0 * graph.footprint_bytes.sum():
        weights += [(size, False), (0.5 * (time + size), True)]
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        parts = min(len(subset), problem.num_groups)
        for weight, by_speed in weights:
            share = _speeds(problem, subset[:parts]) if by_speed else limits[subset[:parts]] / limits[subset[:parts]].sum()
            for imbalance in IMBALANCES:
                part = metis_partition(problem, weight, share, imbalance, seed)
                yield map_parts(problem, part, subset[:parts])


def _speeds(problem: Problem, subset: Sequence[int]) -> NDArray[np.float64]:
    """Returns share of the work that each device does in equal time."""
    time_s = group_graph(problem).time_s[:, list(subset)]
    common = np.isfinite(time_s).all(axis=1)
    total = time_s[common].sum(axis=0) if common.any() else np.ones(len(subset))
    speed = 1.0 / np.maximum(total, 1e-30)
    return speed / speed.sum()


def metis_partition(
    problem: Problem, weight: NDArray[np.float64], share: NDArray[np.float64], imbalance: int, seed: int
) -> NDArray[np.int32]:
    """Returns one METIS partition of the group graph.

    Args:
        problem: The problem.
        weight: float64 [G], vertex weights.
        share: float64 [parts], target share of the weight of each part.
        imbalance: Allowed overweight of a part in thousandths.
        seed: METIS's random seed.

    Returns:
        int32 [G] part numbers.
    """
    import pymetis

    parts = len(share)
    share = np.maximum(share / share.sum(), 1e-6)  # METIS refuses a share of nothing
    if parts == 1:
        return np.zeros(problem.num_groups, dtype=np.int32)
    graph = group_graph(problem)
    seconds = graph.edge_s(*mean_link(problem))
    # Both directions of a pair are one undirected edge: add up, then list it at both ends.
    ends = np.minimum(graph.source, graph.target), np.maximum(graph.source, graph.target)
    low, high, total = merged_edges(*ends, problem.num_groups, seconds)
    rows, columns = np.concatenate([low, high]), np.concatenate([high, low])
    xadj, order = grouped(rows, np.arange(len(rows)), problem.num_groups)
    options = pymetis.Options(seed=int(seed % (1 << 31)), ufactor=int(imbalance))
    with _stdout_kept_clean():
        result = pymetis.part_graph(
            parts,
            pymetis.CSRAdjacency(xadj.tolist(), columns[order].tolist()),
            vweights=_whole(weight, least=0).tolist(),
            eweights=_whole(np.concatenate([total, total])[order], least=1).tolist(),
            tpwgts=(share / share.sum()).tolist(),
            recursive=parts <= 8,
            options=options,
        )
    return np.asarray(result.vertex_part, dtype=np.int32)


@contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """Discards METIS's output to the C library's stdout when parts are empty: it would appear between results."""
    if os.name != "posix":
        yield
        return
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _whole(values: NDArray[np.float64], *, least: int) -> NDArray[np.int64]:
    """Returns weights for METIS: whole numbers whose sum stays far below the limit of 32 bits."""
    top = float(values.sum())
    if top <= 0.0:
        return np.ones(len(values), dtype=np.int64)
    scaled = np.round(values * (2e8 / top)).astype(np.int64)
    return np.maximum(scaled, least)
