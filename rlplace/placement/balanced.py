"""Contiguous split: groups in topological order, cut into one segment per device.

Problem: minimise the largest segment time, each segment on a device of its own, within the devices' memory. This is solved
exactly: for a bound T, let ``reach[S]`` be the longest prefix that the set S of devices can cover with no segment above T. A
device takes as much as it can, because a shorter remainder is never harder, so ``reach[S] = max over d in S of
extend(reach[S - d], d)``. Like devices are counted instead of listed. T is bisected to the last bit of a real split.

Among splits of that order this planner also builds ones that allow segments up to 10 %, 30 % and any amount above the
optimum and then minimise the sum of compute time and transfers across cuts (dynamic programming with a sliding-window
minimum): a single training step passes a chain one segment after the other, so its time is that sum, not the largest
segment. All are built for 1 to D devices and two topological orders, layer-wise pipelines
(`rlplace.placement.published.bipartition`) compete as well, and the simulator picks.

Paper: the exact min-max partition is folklore (Khanna, Muthukrishnan, Skiena, "Efficient array partitioning", 1997); GPipe
(Huang et al., 2019) splits by the same objective with a heuristic.

Departures: memory of a segment is estimated as resident bytes plus saved activations, and as resident bytes alone where that
leaves no split; the simulator's exact peaks decide, with the shared repair. With more than `MAX_STATES` sets of unlike devices
only the order of `device_order` and its reverse are tried, and the split is exact for those orders.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_classes, device_subsets, map_parts, one_shot_planner
from rlplace.placement.common.groupgraph import finite_links, group_graph
from rlplace.placement.published.bipartition import straight_pipelines
from rlplace.placement.published.bipartition.layers import layer_orders
from rlplace.problem import Problem

MAX_STATES = 4096
"""Sets of devices, like ones counted, up to which all device orders are searched."""

SLACKS = (1.0, 1.1, 1.3, np.inf)
"""Segment times allowed, as multiples of the optimum, when traffic across cuts is minimised."""


class Segments(NamedTuple):
    """Groups in the order that is cut, for C classes of devices, or devices in the order of the segments."""

    prefix: Any  # float64 [C, G + 1], seconds of the groups before each position
    barrier: Any  # int64 [C, G + 1], position of the first barred group at or after each position
    size: Any  # float64 [G + 1], bytes of the groups before each position
    limit: Any  # float64 [C] bytes


@one_shot_planner("balanced")
def balanced(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields splits for every number of devices, order and slack, then layer-wise pipelines; see the module docstring."""
    del seed
    for subset in reversed(device_subsets(problem)):
        for order in layer_orders(problem):
            yield from _splits(problem, order, subset)
    yield from straight_pipelines(problem)


def min_max_split(
    problem: Problem, order: NDArray[np.int32], devices: Sequence[int], size_bytes: NDArray[np.int64]
) -> tuple[float, list[int], NDArray[np.int64]] | None:
    """Returns the exact contiguous split with the smallest largest segment time.

    Args:
        problem: The problem.
        order: int32 [G], groups in the order that is cut.
        devices: Devices to use; each takes at most one segment, in any order.
        size_bytes: int64 [G], bytes that count against a device's memory limit.

    Returns:
        The largest segment time, the devices in segment order and int64 [segments + 1] segment offsets into `order`; None when
        no split respects memory and null times.
    """
    classes = device_classes(problem, devices)
    segments = segments_of(problem, order, [members[0] for members in classes], size_bytes)
    counts = np.array([len(members) for members in classes], dtype=np.int64)
    sequences = None
    if np.prod(counts.astype(float) + 1) > MAX_STATES:
        class_of = {device: index for index, members in enumerate(classes) for device in members}
        first = np.array([class_of[d] for d in devices], dtype=np.int64)
        sequences = np.stack([first, first[::-1]])

    def longest(split: tuple[NDArray[np.int64], NDArray[np.int64]]) -> float:
        runs = zip(split[0], pairwise(split[1]), strict=True)
        return max((float(segments.prefix[kind, b] - segments.prefix[kind, a]) for kind, (a, b) in runs), default=0.0)

    best = _cover(np.inf, segments, counts, sequences)
    if best is None:
        return None
    low, high = 0.0, longest(best)  # real values bracket the optimum from above
    while low < (bound := 0.5 * (low + high)) < high:
        split = _cover(bound, segments, counts, sequences)
        if split is None:
            low = bound
        else:
            best, high = split, min(bound, longest(split))
    pools = [list(members) for members in classes]
    return high, [pools[kind].pop(0) for kind in best[0]], best[1]


def segments_of(problem: Problem, order: NDArray[np.int32], devices: Sequence[int], size_bytes: NDArray[np.int64]) -> Segments:
    """Returns the groups in the order that is cut, for some devices; see `min_max_split`."""
    times = group_graph(problem).time_s[order][:, devices].T
    groups, finite = len(order), np.isfinite(times)
    prefix = np.zeros((len(devices), groups + 1))
    np.cumsum(np.where(finite, times, 0.0), axis=1, out=prefix[:, 1:])
    barrier = np.full((len(devices), groups + 1), groups, dtype=np.int64)
    barrier[:, :-1] = np.where(finite, groups, np.arange(groups))
    barrier = np.minimum.accumulate(barrier[:, ::-1], axis=1)[:, ::-1].copy()
    size = np.concatenate([[0.0], np.cumsum(size_bytes[order].astype(np.float64))])
    return Segments(prefix, barrier, size, problem.memory_limit_bytes[list(devices)])


def _cover(
    bound: float, segments: Segments, counts: NDArray[np.int64], sequences: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns a split with no segment above `bound`: the class of each segment and the offsets; None when there is none."""
    groups = len(segments.size) - 1
    if sequences is not None:
        for sequence in sequences:
            cuts = [0]
            for kind in sequence:
                cuts.append(_extend(cuts[-1], kind, bound, segments))
            if cuts[-1] == groups:
                return sequence, np.array(cuts)
        return None
    reach, last = _reach(bound, segments, counts)
    state = int(reach.argmax())
    if reach[state] < groups:
        return None
    strides = np.concatenate([[1], np.cumprod(counts + 1)[:-1]])
    kinds: list[int] = []
    cuts = [groups]
    while last[state] >= 0:
        kinds.append(int(last[state]))
        state -= int(strides[kinds[-1]])
        cuts.append(int(reach[state]))
    return np.array(kinds[::-1], dtype=np.int64), np.array(cuts[::-1], dtype=np.int64)


@entry
def _extend(start, kind, bound, s):
    """Returns the end of the longest segment from `start` that a device of class `kind` can take."""
    low, high = start, s.barrier[kind, start]
    while low < high:
        middle = (low + high + 1) // 2
        if s.prefix[kind, middle] - s.prefix[kind, start] <= bound and s.size[middle] - s.size[start] <= s.limit[kind]:
            low = middle
        else:
            high = middle - 1
    return low


@entry
def _reach(bound, s, counts):
    """Returns int64 [states] each: the longest prefix that every multiset of devices covers, and the class of its last one."""
    states = 1
    for count in counts:
        states *= count + 1
    reach, last = np.zeros(states, dtype=np.int64), np.full(states, -1, dtype=np.int64)
    for state in range(1, states):
        rest, stride, best = state, 1, -1
        for kind in range(len(counts)):
            if rest % (counts[kind] + 1) > 0:
                end = _extend(reach[state - stride], kind, bound, s)
                if end > best:
                    best, last[state] = end, kind
            rest //= counts[kind] + 1
            stride *= counts[kind] + 1
        reach[state] = best
    return reach, last


def cheapest_cuts(segments: Segments, cut_s: NDArray[np.float64], bound: float) -> list[int] | None:
    """Returns the offsets that minimise compute plus cut time, no segment above `bound` or its limit; None if there are none.

    Args:
        segments: The groups, with a row for the device of each segment.
        cut_s: float64 [K, G + 1], seconds of a cut before each position.
        bound: Largest time of a segment in seconds.
    """
    best, start = _cheapest(segments, cut_s, bound)
    if best[-1, -1] == np.inf:
        return None
    cuts = [len(segments.size) - 1]
    for row in start[:0:-1]:
        cuts.append(int(row[cuts[-1]]))
    return cuts[::-1]


@entry
def _cheapest(s, cut_s, bound):
    """Returns float64 and int64 [K + 1, G + 1]: the best value, and the start of the last segment.

    ``best[k, j]``: the first j groups on the first k devices. The start of segment k lies in a window whose left end grows
    with j, so a deque of candidates gives every minimum in constant time. Empty segments are allowed.
    """
    prefix, barrier, size, limit = s
    parts, groups = prefix.shape[0], prefix.shape[1] - 1
    best, start = np.full((parts + 1, groups + 1), np.inf), np.zeros((parts + 1, groups + 1), dtype=np.int64)
    queue, value = np.zeros(groups + 1, dtype=np.int64), np.zeros(groups + 1)
    best[0, 0] = 0.0
    for k in range(parts):
        head, tail, left, wall = 0, 0, 0, 0
        for j in range(groups + 1):
            if j > 0 and barrier[k, j - 1] == j - 1:
                wall = j
            paid = cut_s[k, j] if 0 < j < groups else 0.0
            value[j] = best[k, j] + paid - prefix[k, j]
            while tail > head and value[queue[tail - 1]] >= value[j]:
                tail -= 1
            queue[tail] = j
            tail += 1
            while left < j and (left < wall or prefix[k, j] - prefix[k, left] > bound or size[j] - size[left] > limit[k]):
                left += 1
            while queue[head] < left:
                head += 1
            i = queue[head]
            best[k + 1, j] = value[i] + prefix[k, j]
            start[k + 1, j] = i
            if best[k, j] < best[k + 1, j]:  # an empty segment costs no cut
                best[k + 1, j] = best[k, j]
                start[k + 1, j] = j
    return best, start


def _splits(problem: Problem, order: NDArray[np.int32], subset: Sequence[int]) -> Iterator[Assignment]:
    for sizes in (group_graph(problem).footprint_bytes, problem.resident_bytes):
        split = min_max_split(problem, order, subset, sizes)
        if split is not None:
            break
    else:
        return
    bound, devices, cuts = split
    yield _assign(problem, order, devices, cuts)
    if len(subset) == 1:
        return
    # Devices that the optimum leaves empty may still help when segments are allowed to be longer.
    row = devices + [d for d in subset if d not in devices]
    segments, cut_s = segments_of(problem, order, row, sizes), cut_seconds(problem, order, row)
    for slack in SLACKS:
        cheapest = cheapest_cuts(segments, cut_s, bound * slack * (1 + 1e-12))
        if cheapest is not None:
            yield _assign(problem, order, row, cheapest)


def _assign(
    problem: Problem, order: NDArray[np.int32], devices: Sequence[int], cuts: NDArray[np.int64] | list[int]
) -> Assignment:
    part = np.empty(problem.num_groups, dtype=np.int32)
    part[order] = np.repeat(np.arange(len(devices), dtype=np.int32), np.diff(cuts))
    return map_parts(problem, part, devices)


def cut_seconds(problem: Problem, order: NDArray[np.int32], devices: Sequence[int]) -> NDArray[np.float64]:
    """Returns float64 [K, G + 1], seconds of all transfers over a cut before each position, on the link of its devices."""
    graph = group_graph(problem)
    latency, inverse = finite_links(problem)
    position = np.argsort(order)
    onward = position[graph.source] < position[graph.target]
    result = np.zeros((len(devices), len(order) + 1))
    for k, (a, b) in enumerate(pairwise(devices), 1):
        seconds = np.where(onward, graph.edge_s(latency[a, b], inverse[a, b]), graph.edge_s(latency[b, a], inverse[b, a]))
        result[k] = graph.crossing_s(order, seconds)
    return result
