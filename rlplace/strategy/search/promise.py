"""The promise of a group of uniform strategies: seconds that hardly any of them beats, from a few prices of whole passes.

A group has one set of devices and one of `Degrees`. Let t be the seconds of a sample on the devices of one replica, the slowest
of a place, with what its collectives send of the values between blocks. Work that is spread by speed takes b / sum(1 / t) for b
samples. A pipeline of S places adds what no schedule fills, at least (S - 1) / 4 micro-batches of one sample, and the sum of
gradients over the hosts of a place; a single stage hides that at best. Groups whose promise is longer than what a strategy that
fits is expected to take need no prices of their own. Places that cut hosts into unlike parts are held to be worth their prices
last: they promise `UNLIKE_PARTS` times as long.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.strategy.costs import ALL_GATHER, COLLECTIVE_KINDS, CONTEXT_GATHER, EXPERT_ALL_TO_ALL, Cut, Floats
from rlplace.strategy.drafts import Devices, array_of
from rlplace.strategy.executor.meshes import Groups
from rlplace.strategy.executor.traffic import table_s
from rlplace.strategy.search.shapes import Degrees, divisors
from rlplace.strategy.search.tries import SearchProblem

SIZE = 4
"""Samples of a pass whose prices promises come from, beside a pass of the whole batch."""

UNLIKE_PARTS = 1.3

MOST_CHUNKS = 4
"""Stages a place that shorten the time in which a pipeline fills."""

CALLS = {ALL_GATHER: 4, CONTEXT_GATHER: 1, EXPERT_ALL_TO_ALL: 4}
"""Least collectives of a block in a pass, forward and backward, by index of `COLLECTIVE_KINDS`."""


class _Set(NamedTuple):
    """The facts of a set of devices that promises need.

    Attributes:
        counts: int64 [K], devices of each kind.
        in_host: Devices of its smallest host, of those used.
    """

    counts: NDArray[np.int64]
    in_host: int


class Promises:
    """Promises of the groups of one problem."""

    def __init__(self, problem: SearchProblem) -> None:
        """Prices a pass of `SIZE` and one of the whole batch, or the smallest that can be priced."""
        self._problem, costs, balance = problem, problem.costs, problem.balance
        host = np.unique(np.array(problem.cluster.hosts), return_inverse=True)[1]
        kinds = [np.flatnonzero(balance.kind == kind) for kind in range(len(costs.kinds))]
        self._host = host
        self._firsts = [own[np.isin(host[own], np.unique(host[own])[:2])] for own in kinds]
        cuts = [Cut(samples) for samples in divisors(problem.batch)]
        able = [cut for cut in cuts if cut.samples in (SIZE, problem.batch) and balance.can_cut(cut)]
        able = able or [*filter(balance.can_cut, cuts)][:1]
        self._sample_s, self._sent_bytes = np.zeros(len(costs.kinds)), 0.0
        for kind in sorted(set(balance.kind.tolist())) if able else ():
            self._sample_s[kind] = min(balance.pass_s(frozenset((kind,)), cut).sum() / cut.samples for cut in able)
            self._sent_bytes = float(costs.passes(kind, able[0]).sent_bytes.mean()) / able[0].samples
        self._priced = bool(able)
        self._sets: dict[tuple[int, ...], _Set] = {}
        self._samples: dict[tuple[int, ...], Floats] = {}
        self._sums: dict[tuple[int, ...], Floats] = {}
        self._weights: dict[int, float] = {}

    def step_s(self, devices: tuple[int, ...], degrees: Degrees, *, free: bool = False) -> float:
        """Returns the seconds of a step that a group promises; 0 where nothing has a price. `free`: were collectives free."""
        (places, tensor, context, expert, tables), batch = degrees, self._problem.batch
        if not self._priced:
            return 0.0
        counts, in_host = self._set(devices)
        used, parts = np.flatnonzero(counts), tensor * context
        share = max(1.0, batch * places * parts / len(devices))
        sample_s = self._sample_s / parts if free else self._sample(tensor, context, expert)
        rate = float((counts[used] / sample_s[used]).sum())
        if places > 1:  # a place takes the time of its slowest devices
            kinds = Counter(self._problem.balance.kinds(devices, places))
            rate = sum(count / sample_s[list(own)].max() for own, count in kinds.items()) * len(devices) / places
        passes_s = batch * parts / rate
        passes_s *= 1.0 + (places - 1) / (MOST_CHUNKS * share)
        width = len(devices) // places
        if width % in_host and in_host % width:
            passes_s *= UNLIKE_PARTS
        if free or tables > 1 or width <= max(in_host, parts):
            return passes_s
        if expert not in self._weights:
            self._weights[expert] = float(self._problem.costs.held(1, expert).gradient_bytes.sum())
        if places == 1:
            return max(passes_s, self._sum_s(tuple(used.tolist()), self._weights[expert]))
        return passes_s + min(self._sum_s((kind,), self._weights[expert] / places) for kind in used.tolist())

    def _set(self, devices: tuple[int, ...]) -> _Set:
        if devices not in self._sets:
            own = array_of(devices)
            counts = np.bincount(self._problem.balance.kind[own], minlength=len(self._sample_s))
            hosts = np.bincount(self._host[own])
            self._sets[devices] = _Set(counts, int(hosts[hosts > 0].min()))
        return self._sets[devices]

    def _sample(self, tensor: int, context: int, expert: int) -> Floats:
        """Returns float64 [K], seconds of a sample on a replica of devices of each kind, of two hosts at most."""
        key = tensor, context, expert
        if key not in self._samples:
            sent_bytes, seconds = SIZE * self._sent_bytes, self._sample_s / (tensor * context)
            for kind, size, stride, parts in (
                (ALL_GATHER, tensor, 1, context),
                (CONTEXT_GATHER, context, tensor, tensor),
                (EXPERT_ALL_TO_ALL, expert, 1, tensor * context),
            ):
                for number, devices in enumerate(self._firsts):
                    group = min(size, max(2, len(devices) // stride))
                    if size > 1 and len(devices) >= group * stride:
                        table = self._table(COLLECTIVE_KINDS[kind], devices[: group * stride], group, stride)
                        each_s = table_s(table, sent_bytes / parts) / SIZE
                        seconds[number] += len(self._problem.costs.names) * CALLS[kind] * each_s
            self._samples[key] = seconds
        return self._samples[key]

    def _sum_s(self, kinds: tuple[int, ...], size_bytes: float) -> float:
        """Returns seconds of a sum over two hosts of each kind."""
        if kinds not in self._sums:
            own = np.concatenate([self._firsts[kind] for kind in kinds])
            self._sums[kinds] = self._table("all_reduce", own, len(own), 1)
        return table_s(self._sums[kinds], size_bytes)

    def _table(self, name: str, devices: NDArray[np.int64], size: int, stride: int) -> Floats:
        return self._problem.scores.traffic.table(name, Groups(Devices(devices.tolist()), size, stride))
