"""Planners of a few lines: baselines, and memory alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlplace.errors import InputError
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_classes, device_subsets, one_shot_planner
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.published.bipartition import straight_pipelines
from rlplace.problem import Problem


@one_shot_planner("single", repairs=0)  # a repaired plan would use several devices
def single(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields everything on one device: the fastest one on which the model fits.

    Groups that are fixed elsewhere, or cannot run on the device, go to the nearest device that may hold them. One assignment
    per class of like devices, or per device where some groups sit elsewhere, since only then do links matter.
    """
    del seed
    free = problem.group_device < 0
    for members in device_classes(problem):
        for device in members if not free.all() else members[:1]:
            yield np.full(problem.num_groups, device, dtype=np.int32)


@one_shot_planner("round_robin")
def round_robin(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields groups on devices in turn, in topological order: a plan that balances counts and ignores traffic."""
    del seed
    devices = np.empty(problem.num_groups, dtype=np.int32)
    devices[group_graph(problem).order] = np.arange(problem.num_groups) % problem.num_devices
    yield devices


@one_shot_planner("random")
def random_plans(problem: Problem, seed: int, *, samples: int = 64) -> Iterator[Assignment]:
    """Yields random assignments, a baseline that every planner should beat.

    Half of the samples give every group a device of its own choice, half cut the topological order at random places, because
    scattered groups drown in transfers. A random number of devices is used. Samples that do not fit are repaired only when no
    other one fits.
    """
    if samples < 1:
        raise InputError(f"random: samples must be at least 1, found {samples}")
    rng = np.random.default_rng(seed)
    order = group_graph(problem).order
    for index in range(samples):
        used = rng.permutation(problem.num_devices)[: rng.integers(1, problem.num_devices + 1)]
        if index % 2 == 0:
            choice = rng.integers(0, len(used), problem.num_groups)
        else:
            cuts = np.sort(rng.integers(0, problem.num_groups + 1, len(used) - 1))
            choice = np.empty(problem.num_groups, dtype=np.int64)
            choice[order] = np.searchsorted(cuts, np.arange(problem.num_groups), side="right")
        devices: Assignment = used[choice].astype(np.int32)
        # A sample stays random where a group may not sit on its device.
        for group in np.flatnonzero(~problem.group_allowed[np.arange(problem.num_groups), devices]):
            devices[group] = rng.choice(np.flatnonzero(problem.group_allowed[group]))
        yield devices


SLACKS = (1.0, 1.1, 1.3, 1e6)
"""Segment times allowed by `balanced`, as multiples of the optimum, when traffic across cuts is minimised."""


@one_shot_planner("balanced", repairs=6)
def balanced(problem: Problem, seed: int) -> Iterator[Assignment | None]:
    """Yields contiguous splits: groups in topological order, cut into one segment for each device.

    Problem: minimise the largest segment time, with and without what is sent over cuts, within the devices' memory; this is
    solved exactly for an order of devices. As a step passes a chain one segment after the other, its time is closer to the sum,
    so that cuts of least traffic with segments up to 10 %, 30 % and any amount above the optimum compete. All for 1 to D
    devices, two topological orders and two orders of unlike devices (`rlplace.placement.published.bipartition`).

    Paper: the exact min-max partition is folklore (Khanna, Muthukrishnan, Skiena, "Efficient array partitioning", 1997); GPipe
    (Huang et al., 2019) splits by the same objective with a heuristic.

    Departures: memory of a segment is estimated as resident bytes plus saved activations, and as resident bytes alone where
    that leaves no split; the simulator's exact peaks decide, with the shared repair.
    """
    del seed
    yield from straight_pipelines(problem, SLACKS)


@one_shot_planner("m_topo")
def m_topo(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields devices filled in topological order up to an equal share of memory, for every number of devices.

    Problem: fit a model into memory, nothing else. A device's cap is the total footprint divided by the number of devices plus
    the largest group; when it is reached, the next device goes on.

    Paper: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, algorithm m-TOPO.

    Departures: footprints (resident bytes plus saved activations) replace Baechi's replay of allocations; with unlike memory
    the shares follow the limits; groups may end on another device when they may not sit on theirs.
    """
    del seed
    graph = group_graph(problem)
    size = graph.footprint_bytes.astype(np.float64)
    for subset in reversed(device_subsets(problem)):
        limits = problem.memory_limit_bytes[subset]
        share = np.full(len(subset), 1 / len(subset))
        if np.isfinite(limits).all() and limits.sum() > 0:
            share = limits / limits.sum()
        cap = size.sum() * share + size.max(initial=0.0)
        devices = np.empty(problem.num_groups, dtype=np.int32)
        at, used = 0, 0.0
        for group in graph.order:
            if used + size[group] > cap[at] and at + 1 < len(subset):
                at, used = at + 1, 0.0
            used += size[group]
            devices[group] = subset[at]
        yield devices
