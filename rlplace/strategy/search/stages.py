"""Stages by dynamic programming: cuts, devices and axes of every stage together, as Alpa, Piper and Galvatron choose them.

For devices in one order (kinds one after another), one largest data degree and one micro-batch, a table has for every number
of stages, of devices and of blocks left over the least time of the slowest stage; a stage takes consecutive devices, any axes
that they allow, and the recomputation that memory asks for with the micro-batches it has in flight under 1F1B. Devices may be
left out. The drafts have stages of unlike width, degree and kind; local search goes on from them.

References: Zheng et al., "Alpa", OSDI 2022; Tarnawski et al., "Piper", NeurIPS 2021; Miao et al., "Galvatron", VLDB 2022. Their
table over stages, devices and layers is this one; their second criterion, the sum over stages, is left to the executor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.schedule import GPIPE, ONE_F_ONE_B, ZERO_BUBBLE
from rlplace.strategy.costs import FULL, Floats
from rlplace.strategy.drafts import Devices, Draft, Mesh, array_of, plain_draft
from rlplace.strategy.search.fit import fitted
from rlplace.strategy.search.shapes import USUAL_COUNT, divisors, equal_shares
from rlplace.strategy.search.tries import SearchProblem, Tried, Tries

MOST_STAGES = 16
MOST_UNITS = 64
"""Units of devices; more devices go several together."""

MOST_PARTS = 48
"""Parts of the blocks; more blocks go several together."""

MOST_COUNT = 256
"""Micro-batches at most."""

MOST_SPREADS = 16
"""Ways to spread the batch of which there are tables."""

TRIED = 40
"""Drafts of the table that are evaluated, the quickest by the table first."""

Ints = NDArray[np.int64]
Layer = tuple[Ints, Ints, Ints, Ints]
"""By units used from the end, and first part: units in use, then width, last part and axes of the stage."""

StageTimes = tuple[Floats, Ints]
"""[P + 1, P + 1], from part to part: seconds of a micro-batch, inf where there is no room; index of the best axes."""


@dataclass(frozen=True)
class Spread:
    """A batch spread over replicas: their largest number, samples of a micro-batch of each, micro-batches."""

    degree: int
    size: int
    count: int


def try_stages(tries: Tries, until: float) -> Iterator[Tried | None]:
    """Yields drafts of the table as they fit, the most promising first; None for those that do not.

    Args:
        tries: Evaluates.
        until: Spent part of the budget after which no table is begun.

    Raises:
        OutOfBudgetError: The budget ended before.
    """
    problem = tries.problem
    table = StageTable(problem)
    found: dict[Draft, float] = {}
    spreads = [
        Spread(degree, size, count)
        for degree in divisors(problem.batch)
        if degree <= problem.cluster.num_devices // 2
        for (size,), (count,) in equal_shares(problem.batch, degree, problem.space)
        if count <= MOST_COUNT
    ]
    spreads.sort(key=lambda spread: abs(math.log2(spread.count / USUAL_COUNT)))
    for spread, devices in itertools.product(spreads[:MOST_SPREADS], orders(problem)):
        if tries.spent() < until:
            for draft, step_s in table.drafts(devices, spread):
                found.setdefault(draft, step_s)
    for draft in sorted(found, key=lambda draft: found[draft])[:TRIED]:
        for schedule in problem.space.only("schedule", {draft.schedule: None, ZERO_BUBBLE: None}):
            yield fitted(tries, dataclasses.replace(draft, schedule=schedule), 1.2 * tries.best_s)


def orders(problem: SearchProblem) -> list[Devices]:
    """Returns devices by host, kinds in every order (of many, there and back), then with the first kind on both ends."""
    kind, host, count = problem.balance.kind, np.array(problem.cluster.hosts), len(problem.costs.kinds)
    kinds = list(dict.fromkeys(kind.tolist()))
    ways = [list(way) for way in (itertools.permutations(kinds) if len(kinds) <= 3 else (kinds, kinds[::-1]))]
    lines = [np.lexsort((host, np.argsort([*way, *set(range(count)) - set(way)])[kind])).tolist() for way in ways]
    for way, line in zip(ways, lines[:], strict=True):
        half = int((kind == way[0]).sum()) // 2
        if half and len(kinds) > 1:
            lines.append(line[half:] + line[:half])
    return [Devices(line) for line in lines]


class StageTable:
    """The dynamic program of one problem; costs of stages are cached."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        cluster, blocks = problem.cluster, len(problem.costs.names)
        self._kind, self._seats = problem.balance.kind, cluster.seats
        self._room = problem.room_bytes
        self._ends = np.unique(np.linspace(0, blocks, min(blocks, MOST_PARTS) + 1).astype(np.int64))
        self._known: dict[object, tuple[Floats, ...] | None] = {}
        self._spread, self._stages = Spread(0, 0, 0), dict[object, StageTimes | None]()  # of one spread over all orders

    def drafts(self, devices: tuple[int, ...], spread: Spread) -> Iterator[tuple[Draft, float]]:
        """Yields the best draft of every number of stages, with the seconds that the table expects."""
        unit = -(-len(devices) // MOST_UNITS)
        line = array_of(devices)
        units = [line[start : start + unit] for start in range(0, len(devices), unit)]
        total, parts = len(units), len(self._ends) - 1
        best = np.full((total + 1, parts + 1), np.inf)  # by units used from the end, and first part
        best[:, parts] = 0.0
        layers: list[Layer] = []
        for stage in range(1, min(MOST_STAGES, total, parts, spread.count) + 1):
            now, *rest = self._layer(units, best, spread, stage)
            source = np.where(now[1:] < np.minimum.accumulate(now)[:-1], np.arange(1, total + 1)[:, None], 0)
            source = np.maximum.accumulate(np.concatenate([np.zeros((1, parts + 1), dtype=np.int64), source]), axis=0)
            best = np.minimum.accumulate(now)  # units may be left out
            layers.append((source, rest[0], rest[1], rest[2]))
            if stage > 1 and self._problem.space.allows("pipeline", stage) and np.isfinite(best[total, 0]):
                yield self._draft(units, layers, spread), float(best[total, 0]) * (spread.count - 1 + stage)

    def _layer(self, units: list[Ints], best: Floats, spread: Spread, stage: int) -> tuple[Floats, Ints, Ints, Ints]:
        """Returns one stage more, put before those of `best`."""
        total = len(units)
        now = np.full_like(best, np.inf)
        width_of, end_of, axes_of = np.zeros((3, *best.shape), dtype=np.int64)
        for width in range(1, total + 1):
            if width & (width - 1) and total > 8:
                continue
            step = min(width, 8) if total > 8 else 1
            looks: dict[object, list[int]] = {}
            for used in range(-(-width // step) * step, total + 1, step):
                looks.setdefault(self._look(_members(units, used, width)), []).append(used)
            for look, alike in looks.items():
                own = self._stage(_members(units, alike[0], width), look, spread, min(stage, spread.count))
                if own is None:
                    continue
                rows = np.array(alike)
                slowest = np.maximum(own[0][None], best[rows - width][:, None, :])
                end = slowest.argmin(axis=2)
                value = np.take_along_axis(slowest, end[:, :, None], axis=2)[:, :, 0]
                row, part = np.nonzero(value < now[rows])
                at = rows[row], part
                now[at], width_of[at], end_of[at] = value[row, part], width, end[row, part]
                axes_of[at] = own[1][part, end[row, part]]
        return now, width_of, end_of, axes_of

    def _draft(self, units: list[Ints], layers: list[Layer], spread: Spread) -> Draft:
        """Returns the draft of the last layer, walked back from all units and the first part."""
        places, bounds, used, part = [], [0], len(units), 0
        for source, width_of, end_of, axes_of in reversed(layers):
            used = int(source[used, part])
            width, end = int(width_of[used, part]), int(end_of[used, part])
            places.append(list(self._meshes(_members(units, used, width), spread.degree))[int(axes_of[used, part])])
            bounds.append(int(self._ends[end]))
            used, part = used - width, end
        each = spread.size * spread.degree // max(place.data_degree for place in places)
        schedule = ONE_F_ONE_B if spread.count >= len(places) else GPIPE
        return plain_draft(tuple(bounds), places, microbatch=(each,), microbatches=(spread.count,), schedule=schedule)

    def _look(self, devices: Ints) -> tuple[bytes, bytes]:
        """Returns a key that is equal for devices of like kinds that lie alike on hosts and in groups of hosts."""
        seats = self._seats[devices]
        return self._kind[devices].tobytes(), (seats - seats[0]).tobytes()

    def _meshes(self, stage: Ints, degree: int) -> Iterator[Mesh]:
        """Yields meshes of a stage: a tensor group inside a host and copies, whole or shared."""
        width, space, host, devices = len(stage), self._problem.space, self._seats[stage, -1], tuple(stage.tolist())
        for data in divisors(width):
            tensor = width // data
            if degree % data or not space.allows("tensor", tensor) or (tensor & (tensor - 1) and space.tensor is None):
                continue
            groups = host.reshape(data, tensor)
            if (groups != groups[:, :1]).any():
                continue
            if space.allows("replicate", data) and space.allows("shard", 1):
                yield Mesh(devices, replicate=data, tensor=tensor, sequence_parallel=tensor > 1)
            if data > 1 and space.allows("shard", data) and space.allows("sharding", 1) and space.allows("replicate", 1):
                yield Mesh(devices, shard=data, tensor=tensor, sharding=1, sequence_parallel=tensor > 1)

    def _stage(self, devices: Ints, look: object, spread: Spread, passes: int) -> StageTimes | None:
        """Returns seconds of all stages on these devices, with the best axes of each; None without any axes."""
        if spread != self._spread:
            self._spread, self._stages = spread, {}
        if (look, passes) in self._stages:
            return self._stages[look, passes]
        ends, room = self._ends, float(self._room[devices].min())
        rows = []
        for axes, place in enumerate(self._meshes(devices, spread.degree)):
            key = look, axes, spread
            if key not in self._known:
                self._known[key] = self._sums(place, spread)
            sums = self._known[key]
            if sums is None:
                rows.append(np.full((len(ends), len(ends)), np.inf))
                continue
            *running, border, working = sums
            plain_s, again_s, static, kept, saved = (total[None, ends] - total[ends, None] for total in running)
            borders = spread.count * (border[ends][:, None] + border[ends][None, :])
            need, spare = static + passes * kept + borders + working[0] - room, passes * saved
            with np.errstate(invalid="ignore", divide="ignore"):
                part = np.where(need <= 0.0, 0.0, np.where(need < spare, need / spare, np.inf))
                seconds = plain_s + np.where(part > 0.0, part * again_s, 0.0)
            seconds[(ends[None, :] <= ends[:, None]) | np.isnan(seconds)] = np.inf
            rows.append(seconds)
        found = (np.min(rows, axis=0), np.argmin(rows, axis=0)) if rows else None
        self._stages[look, passes] = found
        return found

    def _sums(self, place: Mesh, spread: Spread) -> tuple[Floats, ...] | None:
        """Returns running sums over blocks [B + 1]: seconds of a micro-batch, of recomputation; bytes held, kept, saved.

        Then bytes at borders [B + 1], and working bytes [1].
        """
        samples = spread.size * (spread.degree // place.data_degree)
        if self._problem.costs.why_not(place.cut(samples)) is not None:
            return None
        x = self._problem.scores.packer.all_blocks(place, samples, 2, spread.count, ((0, 0), (FULL, 0)))
        spent = (x.forward_s + x.forward_tensor_s + x.backward_s + x.backward_tensor_s)[0]
        exchanged = (x.update_s + x.reduce_s + x.copies_s)[0]
        kept, again = x.kept_bytes, (x.again_s + x.weight_tensor_s)[1]
        rows = np.stack([spent + exchanged / spread.count, again, x.static_bytes[0], kept[0], kept[0] - kept[1]])
        borders = np.concatenate([[0.0], x.sent_bytes[0]])
        return (*np.cumsum(np.pad(rows, ((0, 0), (1, 0))), axis=1), borders, x.working_backward_bytes[0].max(keepdims=True))


def _members(units: list[Ints], used: int, width: int) -> Ints:
    """Returns the devices of a stage that takes the first `width` of the last `used` units."""
    first = len(units) - used
    return np.concatenate(units[first : first + width])
