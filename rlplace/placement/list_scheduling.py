"""List schedulers: HEFT, earliest task first, and the critical path first.

Ops are scheduled one after the other, and the first op of a group decides for all. The schedules themselves are thrown away:
the executor, which never idles on purpose, runs the assignment. Footprints are resident bytes plus saved activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common import listkernels
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_order, device_subsets, one_shot_planner
from rlplace.placement.common.oparrays import by_rank, empty_schedule, op_arrays, place_rest, upward_rank
from rlplace.problem import Problem
from rlplace.problem.order import successor_lists


@one_shot_planner("heft")
def heft(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields schedules by heterogeneous earliest finish time.

    Problem: makespan of a task graph on unlike devices with communication. Ops are taken by falling upward rank (mean time plus
    the longest mean path, transfers included, to the end) and put on the device where they finish earliest, into the first idle
    gap that is long enough (insertion).

    Paper: Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for heterogeneous computing", IEEE
    Transactions on Parallel and Distributed Systems 13(3), 2002.

    Departures: ops of a group share a device; a device is only considered while the group's footprint fits; a tensor that was
    sent to a device once is there for later readers. Candidates differ in the number of devices, in whether transfers queue for
    channels, and in whether ranks count transfers.
    """
    del seed
    orders = [by_rank(problem, upward_rank(problem, communication=flag)) for flag in (True, False)]
    for subset in _subsets(problem):
        for order, contention in ((orders[0], False), (orders[0], True), (orders[1], True)):
            yield earliest_finish(problem, order, subset, contention=contention).devices


@one_shot_planner("critical_path")
def critical_path(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields schedules in which the longest chain stays on one device, and everything else finishes as early as it can.

    Problem: makespan. Groups that hold an op of the critical path (longest path with mean times and transfers) go to one device
    in path order until its memory is full; the others are placed by earliest finish time with insertion, as in `heft`.

    Paper: the "critical path on a processor" rule of Topcuoglu, Hariri, Wu (2002), as FastT uses it for device placement: Yi et
    al., "Fast training of deep learning models over multiple GPUs", Middleware 2020.

    Departures: groups instead of ops; candidates differ in the number of devices and in whether transfers queue; the path's
    device is the first of `device_order`.
    """
    del seed
    rank = upward_rank(problem, communication=True)
    order, home = by_rank(problem, rank), device_order(problem)[0]
    footprint, room = op_arrays(problem).footprint, float(problem.memory_limit_bytes[home])
    decided = np.full(problem.num_groups, -1, dtype=np.int32)
    for group in problem.op_group[critical_ops(problem, rank)].tolist():
        if decided[group] < 0 and problem.group_allowed[group, home] and footprint[group] <= room:
            decided[group] = home
            room -= float(footprint[group])
    for subset in _subsets(problem):
        for contention in (False, True):
            yield earliest_finish(problem, order, subset, contention=contention, decided=decided).devices


@one_shot_planner("m_etf")
def m_etf(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields schedules by earliest task first, with memory.

    Problem: makespan on devices of limited memory. Of all ready ops and all devices with room for the op's group, the pair that
    can start earliest goes next; ties go to the op with the longest path to the end.

    Paper: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, algorithm m-ETF; the memory-free
    rule is Hwang, Chow, Anger, Lee, "Scheduling precedence graphs in systems with interprocessor communication times", SIAM
    Journal on Computing 18(2), 1989.

    Departures: a whole group (forward, backward and update) is placed when its first op is; room is counted by footprint
    instead of Baechi's replay of allocations, the exact peak is checked by simulation; transfers queue for the problem's
    channels instead of one channel per device; when inputs can be on a device is estimated when an op becomes ready, and again
    only when it is taken, while Baechi renews the estimate with every transfer; ties follow priority instead of topological
    order; candidates differ in the number of devices and in the share of memory that may be planned (all of it, or 85 %).
    """
    del seed
    limited = bool(np.isfinite(problem.memory_limit_bytes).any())
    for subset in _subsets(problem):
        for share in (1.0, 0.85) if limited else (1.0,):
            yield earliest_start(problem, subset, share).devices


def _subsets(problem: Problem) -> Iterator[list[int]]:
    return reversed(device_subsets(problem, least=min(2, problem.num_devices)))


def earliest_finish(
    problem: Problem,
    order: NDArray[np.int32],
    subset: Sequence[int],
    *,
    contention: bool,
    decided: NDArray[np.int32] | None = None,
) -> listkernels.ListSchedule:
    """Schedules by earliest finish time, with insertion.

    Args:
        problem: The problem.
        order: int32 [N], ops in the order they are scheduled, producers first.
        subset: Devices that may be used; groups that are allowed on none of them go to any allowed device.
        contention: Whether transfers wait for their channels.
        decided: int32 [G], devices that are fixed beforehand, -1 elsewhere.
    """
    arrays = op_arrays(problem)
    made = empty_schedule(problem, subset, problem.memory_limit_bytes.copy())
    if decided is not None:
        made.devices[:] = decided
        placed = decided >= 0
        np.subtract.at(made.room, decided[placed], arrays.footprint[placed].astype(np.float64))
    listkernels.heft(order, contention, arrays, made)
    place_rest(problem, made.devices, made.room)
    return made


def earliest_start(problem: Problem, subset: Sequence[int], share: float = 1.0) -> listkernels.ListSchedule:
    """Schedules the ready op, on a device with room for its group, that can start earliest.

    Args:
        problem: The problem.
        subset: Devices that may be used.
        share: Part of the memory that may be planned.
    """
    arrays = op_arrays(problem)
    made = empty_schedule(problem, subset, problem.memory_limit_bytes * share)
    listkernels.earliest_task_first(upward_rank(problem, communication=False), arrays, made)
    place_rest(problem, made.devices, made.room)
    return made


def critical_ops(problem: Problem, rank: NDArray[np.float64]) -> list[int]:
    """Returns ops of a longest path: from the op of highest rank, always to the successor of highest rank."""
    successors, starts = successor_lists(*problem.op_edges, problem.num_ops)
    path = [int(rank.argmax())]
    while following := successors[starts[path[-1]] : starts[path[-1] + 1]]:
        path.append(max(following, key=lambda op: (rank[op], -op)))
    return path
