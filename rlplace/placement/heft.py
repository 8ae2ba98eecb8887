"""HEFT: heterogeneous earliest finish time.

Problem: makespan of a task graph on unlike devices with communication. Ops are taken by falling upward rank (mean time plus
the longest mean path, transfers included, to the end) and put on the device where they finish earliest, into the first idle
gap that is long enough (insertion).

Paper: Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for heterogeneous computing", IEEE
Transactions on Parallel and Distributed Systems 13(3), 2002.

Departures: ops of a group share a device, so the first op of a group decides for all; a device is only considered while the
group's footprint (resident bytes plus saved activations) fits; a tensor that was sent to a device once is there for later
readers. Candidates differ in the number of devices, in whether transfers queue for channels, and in whether ranks count
transfers. HEFT's own schedule is thrown away: the executor, which never idles on purpose, runs the assignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common import listkernels
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_subsets
from rlplace.placement.common.oparrays import by_rank, empty_schedule, op_arrays, place_rest, upward_rank
from rlplace.problem import Problem


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields assignments for every number of devices, with and without queueing transfers and ranks that count them."""
    del seed
    orders = [by_rank(problem, upward_rank(problem, communication=flag)) for flag in (True, False)]
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        for order, contention in ((orders[0], False), (orders[0], True), (orders[1], True)):
            yield schedule(problem, order, subset, contention=contention).devices


def schedule(
    problem: Problem,
    order: NDArray[np.int32],
    subset: Sequence[int],
    *,
    contention: bool,
    decided: NDArray[np.int32] | None = None,
) -> listkernels.Schedule:
    """Insertion-based earliest finish time.

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
    busy = (problem.num_devices, problem.num_ops + 1)
    listkernels.heft(
        order, contention, np.empty(busy), np.empty(busy), np.zeros(problem.num_devices, dtype=np.int64), arrays, made
    )
    place_rest(problem, made.devices, made.room)
    return made
