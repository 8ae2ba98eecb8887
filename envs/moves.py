"""Proposals for Refinement-v0: moves of one group or of a run of neighbouring groups to another device.

In the instance's topological order, groups that follow each other on one device form a *run*. Moving part of a run to the
device next to it shifts a cut; moving one group is the special case of length one.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from rlplace.envs.instance import Instance

_FOCUS = 0.6  # share of proposals whose seed group is drawn by tightness instead of uniformly
_TO_NEIGHBOUR = 0.6  # share whose destination is the device of a group that exchanges data with the seed
_SINGLE = 0.5  # share of single-group moves; the others take a piece of the run around the seed


@njit(cache=True)  # type: ignore[misc]
def _draw(  # type: ignore[no-untyped-def]
    uniform, order, position, device_of_group, cumulative, neighbour_ptr, neighbour, allowed, num_devices, first, last, device
):
    """Fills `first`, `last`, `device` [K]; `uniform` float64 [K, 8] is the only source of randomness."""
    groups = len(order)
    for k in range(len(first)):
        first[k], last[k], device[k] = -1, -1, 0
        if uniform[k, 0] < _FOCUS:
            seed = np.searchsorted(cumulative, uniform[k, 1] * cumulative[-1])
            seed = min(seed, groups - 1)
        else:
            seed = min(int(uniform[k, 1] * groups), groups - 1)
        source = device_of_group[seed]
        target = -1
        degree = neighbour_ptr[seed + 1] - neighbour_ptr[seed]
        if uniform[k, 2] < _TO_NEIGHBOUR and degree > 0:
            other = neighbour[neighbour_ptr[seed] + min(int(uniform[k, 3] * degree), degree - 1)]
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


def propose(
    instance: Instance,
    device_of_group: NDArray[np.int32],
    tightness: NDArray[np.float64],
    rng: np.random.Generator,
    count: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Draws `count` distinct moves.

    Args:
        instance: The instance.
        device_of_group: int32 [G], the plan to change.
        tightness: float64 [G] in 0..1; tight groups are proposed more often.
        rng: Source of randomness.
        count: Number of rows; rows that found no legal or no new move have ``first == -1``.

    Returns:
        first, last (positions in the instance's order) and device, each int32 [count].
    """
    first = np.full(count, -1, dtype=np.int32)
    last, device = first.copy(), np.zeros(count, dtype=np.int32)
    if instance.problem.num_devices > 1:
        position = np.empty(len(instance.order), dtype=np.int32)
        position[instance.order] = np.arange(len(instance.order), dtype=np.int32)
        cumulative = np.cumsum(tightness**2 + 1e-3)
        _draw(
            rng.random((count, 8)), instance.order, position, device_of_group, cumulative, instance.neighbour_ptr,
            instance.neighbour, instance.allowed, instance.problem.num_devices, first, last, device,
        )  # fmt: skip
        size = len(instance.order)
        key = (first.astype(np.int64) * size + last) * instance.problem.num_devices + device
        _, keep = np.unique(key, return_index=True)
        again = np.ones(count, dtype=bool)
        again[keep] = False
        first[again] = last[again] = -1
    return first, last, device


def apply_move(instance: Instance, device_of_group: NDArray[np.int32], first: int, last: int, device: int) -> NDArray[np.int32]:
    """A copy of the plan with the groups ``order[first..last]`` on `device`."""
    changed = device_of_group.copy()
    changed[instance.order[first : last + 1]] = device
    return changed
