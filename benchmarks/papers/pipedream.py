"""PipeDream's own optimum, which no placement can hold: stages with replicas of their own, inside hosts and between them.

    A[i..j][m] = min over cuts k, replicas r < m of max(A[i..k][m - r], stage(k+1..j, r), 2 a_k / (B r))
    stage(i..j, m) = (C_ij + 4 (m - 1) W_ij / (B m)) / m

with C the compute seconds of a micro-batch, W the weights, a_k the activations at the cut (as large as their gradients) and B
the bandwidth. Devices in hosts are solved host by host: the result inside a host is the compute time one level up. The strategy
of `rlplace place` has such stages; this is the paper's table, on the ops of a problem, for comparison.

Paper: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019; formulas and the memory
test as in its repository msr-fiddle/pipedream. The memory test counts a stage itself among the machines behind it, which the
released code does not; weights are charged every micro-batch, as PipeDream trains; a machine may stay unused.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry
from rlplace.planners.bipartition.layers import Layers, make_layers
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.pipedream.stages import States, branch_states, chain_states
from rlplace.problem import Problem

MAX_LAYERS = 96
"""Layers that are told apart here; neighbours are merged beyond. Solving a host takes their third power."""


@dataclass(frozen=True)
class Level:
    """Machines that are joined alike.

    Attributes:
        machines: How many; above the first level a machine is a whole host.
        bandwidth_bytes_per_s: Between two of them; inf: transfers cost nothing.
    """

    machines: int
    bandwidth_bytes_per_s: float


def device_levels(problem: Problem) -> tuple[Level, ...]:
    """One level, or two where devices fall into hosts of equal size with links at least twice as quick inside."""
    count = problem.num_devices
    bandwidth = problem.links.bandwidth_bytes_per_s
    exists = (bandwidth > 0) & ~np.eye(count, dtype=bool)
    if not exists.any():
        return (Level(count, float("inf")),)
    slowest, quickest = float(bandwidth[exists].min()), float(bandwidth[exists].max())
    one = (Level(count, slowest),)
    if quickest < 2.0 * slowest:
        return one
    near = (bandwidth >= np.sqrt(slowest * quickest)) & (bandwidth.T >= np.sqrt(slowest * quickest))
    np.fill_diagonal(near, True)
    hosts = {tuple(np.flatnonzero(row).tolist()) for row in near}
    sizes = {len(host) for host in hosts}
    if len(sizes) != 1 or len(hosts) * sizes.copy().pop() != count or not 1 < sizes.copy().pop() < count:
        return one
    size = sizes.pop()
    inner = float(bandwidth[exists & near].min())
    return Level(size, inner), Level(count // size, slowest)


@dataclass(frozen=True)
class ReplicatedStage:
    """A stage of the optimum.

    Attributes:
        begin, end: States between which its layers lie.
        replicas: Devices that run copies of it.
    """

    begin: int
    end: int
    replicas: int


def solve_levels(
    states: States, levels: tuple[Level, ...], memory_bytes: float = float("inf")
) -> tuple[float, list[ReplicatedStage]] | None:
    """The slowest stage's time and the stages, or None when nothing fits.

    Args:
        states: The states of the chain or graph; the slowest worker's times count.
        levels: From the inside out.
        memory_bytes: Memory of a device.
    """
    seconds = states.time_s.max(axis=0)
    base = np.where(states.inside, seconds[None, :] - seconds[:, None], np.inf)
    kept = states.resident_bytes + states.stash_bytes
    tables: list[tuple[NDArray[Any], NDArray[Any]]] = []
    devices = 1
    for number, level in enumerate(levels):
        shape = (states.count, states.count, level.machines + 1)
        best = np.empty(shape)
        origin, copies = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        inverse = 1.0 / level.bandwidth_bytes_per_s
        replicated_kernel(
            states.inside, base, states.weight_bytes, kept, states.crossing_bytes, inverse, float(memory_bytes) * devices,
            number + 1 < len(levels), best, origin, copies,
        )  # fmt: skip
        tables.append((origin, copies))
        base, devices = best[:, :, -1].copy(), devices * level.machines
    if not np.isfinite(base[0, -1]):
        return None
    stages = [ReplicatedStage(0, states.count - 1, 1)]
    for level, (origin, copies) in zip(reversed(levels), reversed(tables), strict=True):
        stages = [inner for stage in stages for inner in _trace(origin, copies, stage, level.machines)]
    return float(base[0, -1]), stages


def _trace(
    origin: NDArray[np.int32], copies: NDArray[np.int32], stage: ReplicatedStage, machines: int
) -> list[ReplicatedStage]:
    stages_backwards = []
    end, left = stage.end, machines
    while True:
        count = int(copies[stage.begin, end, left])
        if count == 0:  # a machine stays unused
            left -= 1
            continue
        before = int(origin[stage.begin, end, left])
        stages_backwards.append(ReplicatedStage(stage.begin if before < 0 else before, end, count * stage.replicas))
        if before < 0:
            return stages_backwards[::-1]
        end, left = before, left - count


def replicated_optimum(problem: Problem, microbatches: int = 1) -> dict[str, Any]:
    """What PipeDream's planner would run: stages with their replicas, as plain data.

    Returns:
        ``bottleneck_s`` of a micro-batch (None when its memory test leaves nothing), ``stages`` with the names of their first
        and last groups, ``replicas`` and ``groups``, ``levels``, ``devices_used`` and ``in_flight``, the micro-batches that
        keep the pipeline full.
    """
    devices = list(range(problem.num_devices))
    graph = group_graph(problem)
    layers = make_layers(problem, graph.order, devices, microbatches=microbatches, max_layers=MAX_LAYERS)
    states = branch_states(problem, layers) or chain_states(layers)
    if states.count > MAX_LAYERS + 1:
        states = chain_states(layers)
    levels = device_levels(problem)
    memory = float(problem.memory_limit_bytes.min())
    solved = solve_levels(states, levels, memory)
    report: dict[str, Any] = {
        "levels": [{"machines": level.machines, "bandwidth_bytes_per_s": _finite(level)} for level in levels],
        "bottleneck_s": None if solved is None else solved[0],
        "stages": [],
    }
    if solved is not None:
        report["stages"] = [_describe(problem, layers, states, stage, graph.order) for stage in solved[1]]
        report["devices_used"] = sum(stage.replicas for stage in solved[1])
        report["in_flight"] = -(-report["devices_used"] // solved[1][0].replicas)
    return report


def _finite(level: Level) -> float | None:
    return level.bandwidth_bytes_per_s if np.isfinite(level.bandwidth_bytes_per_s) else None


def _describe(
    problem: Problem, layers: Layers, states: States, stage: ReplicatedStage, order: NDArray[np.int32]
) -> dict[str, Any]:
    mine = states.member[stage.end] & ~states.member[stage.begin]
    groups = [int(g) for g in order if mine[layers.layer_of_group[g]]]
    names = [problem.group_names[g] for g in groups if not layers.follows_backward[g]]
    return {"replicas": stage.replicas, "groups": len(groups), "first": names[0], "last": names[-1]}


@entry
def replicated_kernel(inside, base, weight, kept, crossing, inverse, limit, every_start, best, origin, copies):
    """Fills `best`, `origin`, `copies` [S, S, M + 1]: layers between two states on at most so many machines.

    ``best[i, j, m] = min over k between i and j and r < m of max(best[i, k, m - r], stage(k, j, r), crossing of k / (B r))``,
    or one stage of m copies; ``stage(k, j, r) = (base + 4 (r - 1) weight / (B r)) / r``. `base` [S, S] is the time of one copy,
    `inverse` 1 / B. A stage must hold `kept` bytes [S] (weights and activations) for each micro-batch that the machines from
    it on have in flight, shared by its copies. `origin` is -1 for one stage; `copies` 0: a machine less does as well.
    """
    states, machines = len(weight), best.shape[2] - 1
    best[:] = np.inf
    for m in range(1, machines + 1):
        for i in range(states if every_start else 1):
            for j in range(i + 1, states):
                if not inside[i, j]:
                    continue
                found, where, count = best[i, j, m - 1], -1, 0
                for r in range(1, m + 1):
                    before = machines - (m - r)
                    depth = (before + r - 1) // r
                    for k in range(i, j) if r < m else range(i, i + 1):
                        if not inside[i, k] or not inside[k, j] or (r < m and k == i):
                            continue
                        if depth * (kept[j] - kept[k]) > limit:
                            continue
                        seconds = (base[k, j] + 4.0 * (r - 1) * (weight[j] - weight[k]) * inverse / r) / r
                        if r < m:
                            seconds = max(max(seconds, best[i, k, m - r]), crossing[k] * inverse / r)
                        if seconds < found:
                            found, where, count = seconds, (k if r < m else -1), r
                best[i, j, m], origin[i, j, m], copies[i, j, m] = found, where, count
