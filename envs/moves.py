"""Moves for Refinement-v0: sets of groups that go to one device together.

Half of the proposals come from the planners' bottleneck analysis: what would shorten the critical chain of the current
timeline. The others are drawn at random: a group, or a run of neighbouring groups (in topological order, on one device), goes
to another device, more often around tight groups and towards devices that they exchange data with.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rlplace.envs.instance import Instance
from rlplace.planners.common.bottleneck import ranked_moves
from rlplace.simulator.timeline import Timeline

_FOCUS = 0.6  # share of random proposals whose seed group is drawn by tightness instead of uniformly
_TO_NEIGHBOUR = 0.6  # share whose destination is the device of a group that exchanges data with the seed
_SINGLE = 0.5  # share of single-group moves; the others take a piece of the run around the seed


@dataclass(frozen=True, eq=False)
class Moves:
    """K moves; a move without groups does not exist.

    Attributes:
        ptr: int64 [K + 1], offsets into `groups`.
        groups: int32, the groups of all moves one after another.
        device: int32 [K], where the groups of each move go.
        saving_s: float64 [K], what the bottleneck analysis expects to save; 0 for random moves.
    """

    ptr: NDArray[np.int64]
    groups: NDArray[np.int32]
    device: NDArray[np.int32]
    saving_s: NDArray[np.float64]

    @property
    def exists(self) -> NDArray[np.bool_]:
        """Bool [K]."""
        return np.diff(self.ptr) > 0

    @property
    def first_group(self) -> NDArray[np.int32]:
        """int32 [K], the first group of each move, -1 where it does not exist."""
        first = np.full(len(self.device), -1, dtype=np.int32)
        exists = self.exists
        first[exists] = self.groups[self.ptr[:-1][exists]]
        return first

    def apply(self, device_of_group: NDArray[np.int32], index: int) -> NDArray[np.int32]:
        """A copy of the plan after move `index`."""
        changed = device_of_group.copy()
        changed[self.groups[self.ptr[index] : self.ptr[index + 1]]] = self.device[index]
        return changed


def make_moves(rows: list[tuple[float, list[int], int]], count: int) -> Moves:
    """Moves from rows (saving, groups, device), filled up to `count` with moves that do not exist."""
    sizes = [len(groups) for _, groups, _ in rows] + [0] * (count - len(rows))
    ptr = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(sizes, out=ptr[1:])
    device, saving = np.zeros(count, dtype=np.int32), np.zeros(count)
    for index, (seconds, _, where) in enumerate(rows):
        device[index], saving[index] = where, seconds
    return Moves(ptr, np.array(list(chain.from_iterable(row[1] for row in rows)), dtype=np.int32), device, saving)


def propose(
    instance: Instance,
    timeline: Timeline,
    device_of_group: NDArray[np.int32],
    tightness: NDArray[np.float64],
    rng: np.random.Generator,
    count: int,
) -> Moves:
    """At most `count` distinct moves: the best of the bottleneck analysis, then random ones.

    Args:
        instance: The instance.
        timeline: Timeline of the plan.
        device_of_group: int32 [G], the plan to change.
        tightness: float64 [G] in 0..1; tight groups are proposed more often.
        rng: Source of randomness.
        count: K.
    """
    if instance.problem.num_devices < 2:
        return make_moves([], count)
    guided = ranked_moves(instance.problem, timeline, device_of_group, limit=count // 2)
    rows = [(seconds, [group for group, _ in move], move[0][1]) for seconds, move in guided]
    seen = {(tuple(groups), device) for _, groups, device in rows}
    for groups, device in draw_runs(instance, device_of_group, tightness, rng, count - len(rows)):
        if (tuple(groups), device) not in seen:
            seen.add((tuple(groups), device))
            rows.append((0.0, groups, device))
    return make_moves(rows, count)


def draw_runs(
    instance: Instance,
    device_of_group: NDArray[np.int32],
    tightness: NDArray[np.float64],
    rng: np.random.Generator,
    count: int,
) -> list[tuple[list[int], int]]:
    """At most `count` random moves as (groups, device)."""
    order, graph = instance.graph.depth_first_order, instance.graph
    first = np.full(count, -1, dtype=np.int32)
    last, device = first.copy(), np.zeros(count, dtype=np.int32)
    uniform, cumulative = rng.random((count, 8)), np.cumsum(tightness**2 + 1e-3)
    _draw(
        uniform, np.searchsorted(cumulative, uniform[:, 1] * cumulative[-1]), order, instance.position, device_of_group,
        graph.neighbor_ptr, graph.neighbor, instance.allowed, instance.problem.num_devices, first, last, device,
    )  # fmt: skip
    found = np.flatnonzero(first >= 0)
    return [(order[first[k] : last[k] + 1].tolist(), int(device[k])) for k in found]


@njit(cache=True, error_model="numpy", no_cfunc_wrapper=True)  # type: ignore[misc]
def _draw(  # type: ignore[no-untyped-def]
    uniform, tight, order, position, device_of_group, neighbor_ptr, neighbor, allowed, num_devices, first, last, device
):
    """Fills `first`, `last`, `device` [K]; `uniform` float64 [K, 8] is the only source of randomness.

    tight: int64 [K], for each draw the seed group that tightness would choose.
    """
    groups = len(order)
    for k in range(len(first)):
        if uniform[k, 0] < _FOCUS:
            seed = min(tight[k], groups - 1)
        else:
            seed = min(int(uniform[k, 1] * groups), groups - 1)
        source = device_of_group[seed]
        target = -1
        degree = neighbor_ptr[seed + 1] - neighbor_ptr[seed]
        if uniform[k, 2] < _TO_NEIGHBOUR and degree > 0:
            other = neighbor[neighbor_ptr[seed] + min(int(uniform[k, 3] * degree), degree - 1)]
            target = device_of_group[other]
        if target < 0 or target == source:
            target = (source + 1 + min(int(uniform[k, 4] * (num_devices - 1)), num_devices - 2)) % num_devices
        low = high = position[seed]
        if uniform[k, 5] >= _SINGLE:
            reach = int(2.0 ** (uniform[k, 6] * 7.0))  # 1 to 128, log-uniform
            if uniform[k, 7] < 0.67:
                while high + 1 < groups and high - position[seed] < reach and device_of_group[order[high + 1]] == source:
                    high += 1
            if uniform[k, 7] > 0.33:
                while low > 0 and position[seed] - low < reach and device_of_group[order[low - 1]] == source:
                    low -= 1
        legal = True
        for index in range(low, high + 1):
            legal = legal and allowed[order[index], target]
        if not legal:
            low = high = position[seed]
            legal = allowed[seed, target]
        if legal:
            first[k], last[k], device[k] = low, high, target
