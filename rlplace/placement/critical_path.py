"""Critical path first: the longest chain stays on one device, everything else finishes as early as it can.

Problem: makespan. Groups that hold an op of the critical path (longest path with mean times and transfers) go to one device in
path order until its memory is full; the others are placed by earliest finish time with insertion, as in `heft`.

Paper: the "critical path on a processor" rule of Topcuoglu, Hariri, Wu (2002), as FastT uses it for device placement: Yi et
al., "Fast training of deep learning models over multiple GPUs", Middleware 2020.

Departures: groups instead of ops; candidates differ in the number of devices and in whether transfers queue; the path's device
is the first of `device_order`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_order, device_subsets
from rlplace.placement.common.oparrays import by_rank, op_arrays, upward_rank
from rlplace.placement.heft import schedule
from rlplace.problem import Problem


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields assignments for every number of devices, with and without queueing transfers."""
    del seed
    rank = upward_rank(problem, communication=True)
    order = by_rank(problem, rank)
    home = device_order(problem)[0]
    arrays = op_arrays(problem)
    room = float(problem.memory_limit_bytes[home])
    decided = np.full(problem.num_groups, -1, dtype=np.int32)
    for op in critical_ops(problem, rank):
        group = int(problem.op_group[op])
        if decided[group] < 0 and problem.group_allowed[group, home] and arrays.footprint[group] <= room:
            decided[group] = home
            room -= float(arrays.footprint[group])
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        for contention in (False, True):
            yield schedule(problem, order, subset, contention=contention, decided=decided).devices


def critical_ops(problem: Problem, rank: NDArray[np.float64]) -> list[int]:
    """Returns ops of a longest path: from the op of highest rank, always to the successor of highest rank."""
    arrays = op_arrays(problem)
    op = int(rank.argmax())
    path = [op]
    while True:
        successors = [
            int(consumer)
            for tensor in arrays.outputs[arrays.output_ptr[op] : arrays.output_ptr[op + 1]]
            for consumer in problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]]
        ]
        if not successors:
            return path
        op = max(successors, key=lambda o: (rank[o], -o))
        path.append(op)
