"""Balanced stages: contiguous parts of the blocks, with the smallest largest time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.strategy.costs import BlockCosts, Cut, Floats, kind_numbers
from rlplace.strategy.drafts import Draft, Mesh, array_of

Kinds = frozenset[int]
"""Numbers of the device kinds of a place."""


@dataclass(frozen=True)
class Stages:
    """Balanced stages.

    Attributes:
        bounds: First block of every stage, and the number of blocks.
        taken_s: Forward and backward of a micro-batch on each.
    """

    bounds: tuple[int, ...]
    taken_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Forward and backward of a micro-batch on all stages."""
        return sum(self.taken_s)

    def paced_s(self, count: int) -> float:
        """Returns the least seconds of so many micro-batches where every stage has a place of its own.

        A stage runs all of them after the stages before it had the first one, and before these have the last one back.
        """
        before = [0.0, *accumulate(self.taken_s)]
        return max(start_s + count * own_s for start_s, own_s in zip(before, self.taken_s, strict=False))


class Balance:
    """Balanced stages of a model on the places of a cluster, cached.

    Args:
        costs: Costs of blocks.
        cluster: The devices.

    Attributes:
        kind: int64 [D], the kind of every device.
    """

    def __init__(self, costs: BlockCosts, cluster: Cluster) -> None:
        self._costs = costs
        self.kind = np.array(kind_numbers(costs, cluster), dtype=np.int64)
        self._bit = np.left_shift(1, self.kind)
        self._kinds: dict[tuple[tuple[int, ...], int], tuple[Kinds, ...]] = {}
        self._seconds: dict[tuple[Kinds, Cut], Floats] = {}
        self._stages: dict[tuple[tuple[Kinds, ...], Cut | tuple[Cut, ...], tuple[int, ...]], Stages] = {}

    def can_cut(self, cut: Cut) -> bool:
        """Returns whether a pass can be cut like that."""
        return self._costs.why_not(cut) is None

    def kinds(self, devices: tuple[int, ...], places: int) -> tuple[Kinds, ...]:
        """Returns the kinds of the devices of equal consecutive places."""
        key = (devices, places)
        if key not in self._kinds:
            bits = np.bitwise_or.reduce(self._bit[array_of(devices)].reshape(places, -1), axis=1)
            self._kinds[key] = tuple(map(self._members, bits.tolist()))
        return self._kinds[key]

    def pass_s(self, kinds: Kinds, cut: Cut) -> Floats:
        """Returns float64 [B], seconds of forward and backward of a micro-batch on the slowest of these kinds."""
        key = (kinds, cut)
        if key not in self._seconds:
            passes = [self._costs.passes(kind, cut) for kind in sorted(kinds)]
            self._seconds[key] = np.max([one.forward_s + one.backward_s for one in passes], axis=0)
        return self._seconds[key]

    def stages_on(self, places: Sequence[Mesh], order: tuple[int, ...], samples: int) -> Stages:
        """Returns `stages` on places of any axes."""
        kinds = tuple(self.kinds(place.devices, 1)[0] for place in places)
        return self.stages(kinds, tuple(place.cut(samples) for place in places), order)

    def stages(self, kinds: tuple[Kinds, ...], cuts: Cut | tuple[Cut, ...], order: tuple[int, ...]) -> Stages:
        """Returns balanced stages.

        Args:
            kinds: Kinds of the devices of every place.
            cuts: Cut of a pass on all places, or on each.
            order: Place of every stage.
        """
        if isinstance(cuts, Cut) and kinds.count(kinds[0]) == len(kinds):  # like places: their order says nothing
            kinds, order = kinds[:1], (0,) * len(order)
        key = (kinds, cuts, order)
        if key not in self._stages:
            each = cuts if isinstance(cuts, tuple) else (cuts,) * len(kinds)
            seconds = np.array([self.pass_s(own, cut) for own, cut in zip(kinds, each, strict=True)])
            bounds = balanced_bounds(seconds, order)
            taken = [float(seconds[row, bounds[part] : bounds[part + 1]].sum()) for part, row in enumerate(order)]
            self._stages[key] = Stages(bounds, tuple(taken))
        return self._stages[key]

    def replicas_s(self, draft: Draft) -> Floats:
        """Returns float64 [D], seconds of a micro-batch through all stages of every replica, on the slowest devices."""
        degree, sizes = draft.data_degree, np.array(draft.shares[0])
        total_s = np.zeros(degree)
        for number, place in enumerate(draft.places):
            inside = [blocks for at, blocks in zip(draft.place_of_stage, draft.ranges, strict=True) if at == number]
            own = [block for blocks in inside for block in blocks]
            share = degree // place.data_degree
            bits = np.bitwise_or.reduce(self._bit[array_of(place.devices)].reshape(place.data_degree, -1), axis=1)
            looks, which = np.unique(
                np.stack([bits, sizes.reshape(-1, share).sum(axis=1)], axis=1), axis=0, return_inverse=True
            )
            taken_s = [self.pass_s(self._members(bit), place.cut(samples))[own].sum() for bit, samples in looks.tolist()]
            total_s += np.repeat(np.array(taken_s)[which.reshape(-1)], share)
        return total_s

    def _members(self, bits: int) -> Kinds:
        """Returns the kinds whose bits are set."""
        return frozenset(kind for kind in range(len(self._costs.kinds)) if bits >> kind & 1)


def balanced_bounds(seconds: Floats, part_row: Sequence[int]) -> tuple[int, ...]:
    """Cuts the blocks into consecutive parts whose slowest is as quick as possible, by dynamic programming.

    Args:
        seconds: float64 [K, B], seconds of a block on every kind of place.
        part_row: For each part, the index of its row of `seconds`; at most B parts.

    Returns:
        One number more than parts: the first block of every part, and B. No part is empty.
    """
    blocks = seconds.shape[1]
    assert 1 <= len(part_row) <= blocks
    ends = np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)], axis=1)
    empty = np.tri(blocks + 1, dtype=bool)
    slowest_s = np.where(np.arange(blocks + 1) == 0, 0.0, np.inf)  # of the parts so far, by where they end
    starts = []
    for row in part_row:
        part_s = np.where(empty, np.inf, ends[row][None, :] - ends[row][:, None])  # [start, end]
        reached = np.maximum(slowest_s[:, None], part_s)
        starts.append(reached.argmin(axis=0))
        slowest_s = reached.min(axis=0)
    return walked_back(starts, blocks)


def walked_back(starts: Sequence[NDArray[np.int64]], blocks: int) -> tuple[int, ...]:
    """Returns the first block of every part, and B, from the best first block of each part by its end, int64 [B + 1]."""
    bounds = [blocks]
    for start in reversed(starts):
        bounds.append(int(start[bounds[-1]]))
    return tuple(reversed(bounds))
