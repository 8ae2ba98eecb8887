"""Compiler-driven partition of a training step.

Paper: Tavarageri, Sridharan, Kaul, "Automatic Model Parallelism for Deep Neural Networks with Compiler and Hardware Support",
arXiv 1906.08168, 2019. No implementation of it is public, and only its abstract was at hand. From the abstract: a compiler
models compute and communication costs of the training graph; heuristics cut the graph so that devices trade little and have
equal loads; hardware *scheduling assistants* are proposed that help the compiler to adjust the split at run time.

Everything else is a reconstruction, not the paper's:

* `nets`: cost of a cut; a tensor is paid once for each device that it is sent to, by latency and bandwidth of the real link.
* `seeds`: contiguous pieces of a topological order, each cut where least crosses near its aim (and streamed bands).
* `fm`: vertices of one device are fused step by step, and on the way back single moves and swaps lower the cut while
  loads stay within 1 + eps of their fair shares and footprints within memory (gain buckets, locked vertices, best prefix).

Candidates differ in devices, imbalance and bands, and the simulator picks.

The assistants decide while a step runs: no plan holds what they do and no engine runs them, so they are no part of the package.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_subsets, one_shot_planner
from rlplace.placement.common.groupgraph import finite_links, finite_mean, group_graph, mean_link
from rlplace.placement.published.compiler import fm, seeds
from rlplace.placement.published.compiler.nets import Level, Nets, contract_nets, make_level, match, problem_nets
from rlplace.problem import Problem

Result = TypeVar("Result")

PASSES = 10
"""Refinement passes at each level, at most."""

ROUNDS = 4
"""Rounds of fusing and refining, at most; they end when one brings nothing."""

SLACKS = (1.0, 4.0, 10.0)
"""Imbalance of the seeds' cuts, as multiples of the allowed one: refinement can balance a cheap cut."""

STARTS, GROWTHS = 8, 6
"""Starts grown from the coarsest level by default, and random orders that each of them tries there."""

COARSEST = 24
"""Vertices per device at which fusing stops."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Groups on devices.

    Attributes:
        device_of_group: int32 [G].
        cut_s: Seconds of all transfers, one after another; a tensor counts once for each device that it is sent to.
        imbalance: Largest of the loads relative to its fair share, minus 1.
    """

    device_of_group: NDArray[np.int32]
    cut_s: float
    imbalance: float


def partition(
    problem: Problem,
    devices: Sequence[int] | None = None,
    *,
    eps: float = 0.05,
    bands: int = 1,
    seed: int = 0,
    nets: Nets | None = None,
    starts: int = STARTS,
) -> Partition:
    """Cuts the graph of groups so that devices have little traffic and equal loads.

    Args:
        problem: The priced graph.
        devices: Devices to use, default all.
        eps: Allowed imbalance: the load of a device may be 1 + `eps` times its fair share (more where single groups are
            larger than that).
        bands: Parts of the step in each of which loads are balanced; 1 balances totals only.
        seed: Seed of the order in which groups are fused.
        nets: Traffic between groups, default `problem_nets`.
        starts: Starts grown from the coarsest level; with 0 there are only those that follow an order, one of each kind.

    Raises:
        InputError: An argument is out of range.
    """
    row = list(range(problem.num_devices)) if devices is None else [int(d) for d in devices]
    if not row or len(set(row)) < len(row) or not all(0 <= d < problem.num_devices for d in row):
        raise InputError(f"partition: devices must be distinct numbers in 0..{problem.num_devices - 1}, found {row}")
    if not np.isfinite(eps) or eps <= 0 or bands < 1:
        raise InputError("partition: eps must be above 0, bands at least 1")
    return Partitioner(problem, row, eps, bands, nets=nets, grown=starts).best(np.random.default_rng(seed))


def warm_up(problem: Problem) -> None:
    """Compiles the parts that partitions of small problems do not use: bands, and levels that fuse vertices."""
    bands = Partitioner(problem, list(range(problem.num_devices)), 0.3, 2)
    size = len(bands.level.band)
    match(bands.level, np.zeros(size, dtype=np.int32), np.arange(size), bands.link, np.inf)


Work = Generator[None, None, NDArray[np.int32]]
"""Work on a partition: yields after every piece, so that a planner can look at the clock, and returns int32 [G]."""


def finished(work: Generator[None, None, Result]) -> Result:
    """Does the rest of some work and returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


class Partitioner:
    """One call of `partition`: the graph on a row of devices, and the limits of its cells and devices."""

    def __init__(
        self, problem: Problem, row: list[int], eps: float, bands: int, *, nets: Nets | None = None, grown: int = 0
    ) -> None:
        self.row, self.eps, self.grown = row, eps, grown
        graph, self.link = group_graph(problem), mean_link(problem)
        self.level = make_level(
            np.ascontiguousarray(graph.time_s[:, row]), graph.footprint_bytes.astype(np.float64), seeds.bands(problem, bands),
            nets or problem_nets(problem),
        )  # fmt: skip
        self.orders = [graph.order, graph.depth_first_order]
        self.crossings = [graph.crossing_s(order, graph.edge_s(*self.link)) for order in self.orders]
        latency, inverse = finite_links(problem)
        index = np.ix_(row, row)
        self.fair = _fair_loads(self.level, bands)
        # A cell must at least hold its largest vertex, or nothing is ever balanced.
        largest = np.zeros(bands)
        shortest = np.where(np.isfinite(self.level.time_s), self.level.time_s, np.inf).min(axis=1)
        np.maximum.at(largest, self.level.band, np.where(np.isfinite(shortest), shortest, 0.0))
        bound = np.maximum(self.fair * (1 + eps), largest * (1 + 1e-9))
        # A copy, since a broadcast array is read-only, for which the kernels would be compiled once more.
        self.limit = np.broadcast_to(np.maximum(bound, 1e-30), (len(row), bands)).copy()
        self.room = np.maximum(problem.memory_limit_bytes[row], 1.0)
        self.machine = fm.Machine(latency[index], inverse[index], self.limit, self.room)

    def best(self, rng: np.random.Generator) -> Partition:
        """Returns the best of the improved starts."""
        return finished(self.work(rng))

    def work(self, rng: np.random.Generator) -> Generator[None, None, Partition]:
        """Yields after every piece of work, and returns the best of the improved starts."""
        parts = []
        for start in self.starts(rng):
            parts.append((yield from self.improve(start, rng)))
        return self.partition_of(min(parts, key=self.score))

    def partition_of(self, part: NDArray[np.int32]) -> Partition:
        """Returns a part of the row for every group as a partition."""
        _, cut_s, imbalance = self.score(part)
        return Partition(np.array(self.row, dtype=np.int32)[part], cut_s, imbalance)

    def starts(self, rng: np.random.Generator) -> Iterator[NDArray[np.int32]]:
        """Seeds, at least one."""
        level = self.level
        finite = np.isfinite(level.time_s)
        time = finite_mean(level.time_s)
        if self.limit.shape[1] == 1:
            speed = 1.0 / np.maximum(np.where(finite, level.time_s, time[:, None]).sum(axis=0), 1e-30)
            for order, crossing in zip(self.orders, self.crossings, strict=True):
                for slack in SLACKS if self.grown else SLACKS[:1]:
                    yield self.legal(seeds.contiguous(time, order, crossing, speed, slack * self.eps))
        for order in self.orders:
            yield self.legal(seeds.streamed(level, order, self.limit, self.room, self.link))
        if len(level.band) > 1:
            for _ in range(self.grown):
                yield self.grow(rng)

    def legal(self, part: NDArray[np.int32], level: Level | None = None) -> NDArray[np.int32]:
        """Moves vertices off devices that are not allowed to the device of the row with the least time for them."""
        time_s = self.level.time_s if level is None else level.time_s
        barred = ~np.isfinite(time_s[np.arange(len(part)), part])
        part = part.copy()
        part[barred] = time_s[barred].argmin(axis=1)
        return part

    def improve(self, part: NDArray[np.int32], rng: np.random.Generator) -> Work:
        """Rounds of fusing vertices of one device step by step, and refining on the way back."""
        part = part.copy()
        yield from self._refine(self.level, part)
        for _ in range(ROUNDS if self.grown else 1):
            before = self.score(part)
            levels, clusters = self._fuse(part, rng)
            parts = [part]
            for level, cluster in zip(levels[1:], clusters, strict=True):
                parts.append(np.zeros(len(level.band), dtype=np.int32))
                parts[-1][cluster] = parts[-2]
            part = yield from self._unfold(parts[-1], levels, clusters)
            if not self.score(part) < before:
                break
        return part

    def grow(self, rng: np.random.Generator) -> NDArray[np.int32]:
        """Returns a start that no order biases: fuses vertices with heavy traffic, then places the coarsest ones in random
        orders.
        """
        levels, clusters = self._fuse(None, rng)
        coarsest = levels[-1]
        grown: list[tuple[tuple[float, float, float], int, NDArray[np.int32]]] = []
        for _ in range(GROWTHS):
            order = rng.permutation(len(coarsest.band)).astype(np.int32)
            part = self.legal(seeds.streamed(coarsest, order, self.limit, self.room, self.link), coarsest)
            finished(self._refine(coarsest, part))
            grown.append((self.score(part, coarsest), len(grown), part))
        return finished(self._unfold(min(grown)[2], levels, clusters))

    def _fuse(self, part: NDArray[np.int32] | None, rng: np.random.Generator) -> tuple[list[Level], list[NDArray[np.int32]]]:
        """Levels from fine to coarse, and the cluster of each vertex of all but the last; with `part` only within its parts."""
        levels, clusters = [self.level], list[NDArray[np.int32]]()
        most_s = float(self.fair.max()) / 4
        while len(levels[-1].band) > COARSEST * len(self.row):
            size = len(levels[-1].band)
            within = np.zeros(size, dtype=np.int32) if part is None else part
            cluster = match(levels[-1], within, rng.permutation(size), self.link, most_s)
            count = int(cluster.max()) + 1
            if count > 0.95 * size:
                break
            if part is not None:
                coarse = np.zeros(count, dtype=np.int32)
                coarse[cluster] = part
                part = coarse
            levels.append(contract_nets(levels[-1], cluster))
            clusters.append(cluster)
        return levels, clusters

    def _unfold(self, part: NDArray[np.int32], levels: list[Level], clusters: list[NDArray[np.int32]]) -> Work:
        """Refines from the coarsest level to the finest."""
        yield from self._refine(levels[-1], part)
        for level, cluster in zip(levels[-2::-1], clusters[::-1], strict=True):
            part = part[cluster]
            yield from self._refine(level, part)
        return part

    def _refine(self, level: Level, part: NDArray[np.int32]) -> Generator[None, None, None]:
        """Makes passes until neither moves nor swaps improve, and yields after each."""
        stale = 0
        for index in range(PASSES):
            loose = index % 2 == 1
            better = fm.refine(part, loose, max(50, len(part) // 4), level, self.machine)
            stale = 0 if better else stale + 1
            yield
            if stale == 2:
                return

    def score(self, part: NDArray[np.int32], level: Level | None = None) -> tuple[float, float, float]:
        """Returns excess, cut seconds and imbalance."""
        state, cut, excess = fm.evaluate(part, self.level if level is None else level, self.machine)
        over = state.load / np.maximum(self.fair, 1e-30)
        return (0.0 if excess < 1e-9 else excess), cut, float(over.max()) - 1.0


def _fair_loads(level: Level, bands: int) -> NDArray[np.float64]:
    """Returns float64 [W], the time at which all devices would end if the work of a band could be divided freely."""
    finite = np.isfinite(level.time_s)
    mean = finite_mean(level.time_s)
    total = np.zeros((bands, level.time_s.shape[1]))
    np.add.at(total, level.band, np.where(finite, level.time_s, mean[:, None]))
    return 1.0 / (1.0 / np.maximum(total, 1e-30)).sum(axis=1)


LARGE_GROUPS = 1000
"""Groups above which there are fewer candidates, and no starts grown from the coarsest level."""

MOST_SUBSETS = 4
"""Numbers of devices that are tried; where there are more, all devices and then half as many each time."""


@one_shot_planner("compiler")
def compiler(problem: Problem, seed: int) -> Iterator[Assignment | None]:
    """Yields partitions for several numbers of devices, bands and allowed imbalances."""
    subsets = list(reversed(device_subsets(problem)))
    if problem.num_groups > LARGE_GROUPS or len(subsets) > MOST_SUBSETS:
        times = 2 if problem.num_groups > LARGE_GROUPS else MOST_SUBSETS
        wanted = {len(subsets[0]) >> halved for halved in range(times)}
        subsets = [subset for subset in subsets if len(subset) in wanted]
    for subset in subsets:
        yield from family(problem, subset, seed=seed)


def family(problem: Problem, devices: Sequence[int], *, seed: int = 0) -> Iterator[Assignment | None]:
    """Yields partitions on given devices that differ in bands and allowed imbalance, and None after pieces of the work.

    Takes the arguments of `partition`.
    """
    starts = 0 if problem.num_groups > LARGE_GROUPS else 2
    for bands, eps in balances(problem.num_groups, len(devices)):
        partitioner = Partitioner(problem, list(devices), eps, bands, grown=starts)
        yield None
        found = yield from partitioner.work(np.random.default_rng(seed))
        yield found.device_of_group
        if len(devices) == 1:
            return


def balances(groups: int, devices: int) -> list[tuple[int, float]]:
    """Returns bands and allowed imbalances to try: from totals only to bands of about three groups a device."""
    finest = max(1, groups // (3 * devices))
    quarter, middle = max(1, finest // 4), max(1, finest // 2)
    pairs = [(1, 0.05), (4, 0.1), (4, 0.3), (8, 0.2), (quarter, 0.3), (middle, 0.1), (finest, 0.2), (finest, 0.5)]
    if groups > LARGE_GROUPS:
        pairs = [(1, 0.05), (middle, 0.2), (finest, 0.2), (finest, 0.5)]
    return list(dict.fromkeys(pair for pair in pairs if pair[0] <= finest))
