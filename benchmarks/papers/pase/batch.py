"""Data parallelism as shards of a captured model: every op cut along its samples, found by following them from the inputs."""

from __future__ import annotations

from collections import deque

from rlplace.planners.pase.captured import sharding_of
from rlplace.problem import Problem


def batch_dims(problem: Problem) -> dict[int, str]:
    """The dimension of each forward op that runs along the samples, where one does; inputs are batch first."""
    sharding = sharding_of(problem)
    touched: dict[int, list[int]] = {}
    for tensor, access in sharding.access.items():
        for op in access:
            touched.setdefault(op, []).append(tensor)
    samples_dim: dict[int, str] = {}
    pending: deque[int] = deque()

    def reach(op: int, name: str) -> None:
        if name and op not in samples_dim and op not in sharding.follows:
            samples_dim[op] = name
            pending.append(op)

    for item in sharding.held:
        if item.is_input and item.axes and item.axes[0] == problem.samples_per_microbatch:
            for op, names in item.access.items():
                reach(op, names[0])
    while pending:
        op = pending.popleft()
        for tensor in touched.get(op, ()):
            access = sharding.access[tensor]
            if samples_dim[op] in access[op]:
                axis = access[op].index(samples_dim[op])
                for other, names in access.items():
                    reach(other, names[axis])
    return samples_dim


def data_parallel(problem: Problem, devices: int) -> dict[str, dict[str, int]]:
    """Shards that cut every op along its samples and nothing else."""
    sharding = sharding_of(problem)
    return {
        problem.op_names[op]: {name: devices}
        for op, name in sorted(batch_dims(problem).items())
        if sharding.dims[op][name] % devices == 0
    }
