"""Random problems on which ties are the rule, and the same problem with other numbers for its devices."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.random import Generator

from rlplace.cluster.links import Device, Links
from rlplace.errors import InputError
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE, Collective, Problem
from rlplace.problem.build import TensorSpec, build_problem

PHASES = (FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD_WEIGHT, UPDATE)


def training_problem(rng: Generator) -> Problem:
    """Up to 16 ops of all phases with costs of 0 to 3 on up to 4 devices, often with collectives."""
    return _with_collectives(rng, _drawn(rng, (5, 8, 17, 18), owned=0.2, missing=0.1, channels=3, phases=PHASES))


def dense_problem(rng: Generator) -> Problem:
    """Up to 14 ops and 15 tensors with costs of 0 to 3 on up to 5 devices that share up to 4 channels."""
    return _drawn(rng, (6, 9, 15, 16), owned=0.25, missing=0.2, channels=4, phases=None)


def _drawn(
    rng: Generator, sizes: tuple[int, ...], *, owned: float, missing: float, channels: int, phases: tuple[int, ...] | None
) -> Problem:
    """Fewer devices, groups, ops and tensors than `sizes`; shares of tensors without a producer and of problems that lack some
    times or links; fewer channels of a transfer than `channels`."""
    devices, groups, ops = (int(rng.integers(1, most)) for most in sizes[:3])
    phase = None if phases is None else np.sort(rng.choice(phases, ops))
    if phase is not None and rng.random() < 0.2:
        phase = rng.permutation(phase)  # nobody says that updates come last
    tensors = []
    for _ in range(rng.integers(0, sizes[3])):
        producer = None if rng.random() < owned else int(rng.integers(ops))
        later = rng.permutation(np.arange(0 if producer is None else producer + 1, ops))
        readers = later[rng.random(len(later)) < 0.3].tolist()
        owner = int(rng.integers(groups)) if producer is None else None
        tensors.append(TensorSpec(producer, int(rng.integers(0, 4)), readers, owner))
    times = rng.integers(0, 4, (ops, devices)).astype(np.float64)
    if rng.random() < missing:
        times[(rng.random(times.shape) < 0.1) & (np.arange(devices) > 0)] = np.nan
    bandwidth = rng.integers(1, 3, (devices, devices)).astype(np.float64)
    if rng.random() < missing:
        bandwidth[rng.random(bandwidth.shape) < 0.1] = 0.0
    most = int(rng.integers(0, channels))  # channels of one transfer; 0: every pair has its own
    held = None
    if most:
        held = tuple(
            tuple(tuple(rng.choice(4, rng.integers(0, most + 1), replace=False).tolist()) for _ in range(devices))
            for _ in range(devices)
        )
    problem = build_problem(
        "drawn",
        time_s=times,  # type: ignore[arg-type]
        tensors=tensors,
        memory_bytes=[None] * devices,
        group=rng.integers(0, groups, ops).tolist(),
        phase=None if phase is None else phase.tolist(),
        resident_bytes=rng.integers(0, 4, groups).tolist(),
        temporary_bytes=rng.integers(0, 3, ops).tolist(),
        links=Links(bandwidth, rng.integers(0, 2, bandwidth.shape).astype(np.float64), held),
        group_device=np.where(rng.random(groups) < 0.1, 0, -1).tolist(),
    )
    limits = [None if rng.random() < 0.5 else int(rng.integers(5, 40)) for _ in range(devices)]
    tables = rng.permutation(len(tensors))[: rng.integers(0, 2)].tolist()
    return dataclasses.replace(
        problem,
        devices=tuple(Device(f"d{i}", limit, int(rng.integers(0, 3))) for i, limit in enumerate(limits)),
        tensor_transfer_s={tensor: rng.integers(0, 3, (devices, devices)).astype(np.float64) for tensor in tables},
    )


def _with_collectives(rng: Generator, problem: Problem) -> Problem:
    """Makes collectives of random ops of one phase; where that would be cyclic, the problem stays as it is."""
    kinds, collectives = [""] * problem.num_ops, []
    free = rng.permutation(problem.num_ops).tolist()
    for _ in range(rng.integers(0, 3)):
        if free:
            same = [op for op in free if problem.op_phase[op] == problem.op_phase[free[0]]][: rng.integers(1, 4)]
            free = [op for op in free if op not in same]
            channels = rng.choice(4, rng.integers(0, 3), replace=False).tolist()
            collectives.append(Collective(tuple(same), tuple(channels)))
            for op in same:
                kinds[op] = "collective"
    try:
        return dataclasses.replace(problem, collectives=tuple(collectives), op_kind=tuple(kinds))
    except InputError:
        return problem


def renumbered(problem: Problem, new: np.ndarray) -> Problem:
    """The same problem with device i called ``new[i]``."""
    old, links, channels = np.argsort(new), problem.links, problem.links.effective_channels
    return dataclasses.replace(
        problem,
        devices=tuple(problem.devices[i] for i in old),
        links=Links(
            links.bandwidth_bytes_per_s[np.ix_(old, old)],
            links.latency_s[np.ix_(old, old)],
            tuple(tuple(channels[i][j] for j in old) for i in old),
        ),
        time_s=problem.time_s[:, old],
        group_device=np.where(problem.group_device >= 0, new[problem.group_device], -1).astype(np.int32),
    )
