"""The PipeDream optimum with replicated stages, inside hosts and between them, as a report.

States of a pipeline: the sets of layers that a first few stages can have, for the PipeDream planner.

A state is a set of layers with everything that feeds them (PipeDream names it by its antichain of last layers). On a chain the
states are the prefixes. A stage is what lies between a state and a larger one.

Axes: S states, L layers, W workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.bipartition.layers import Layers, make_layers
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.pipedream import kernels
from rlplace.problem import FORWARD, Problem

MAX_STATES = 300
"""With more states than this, only those of the chain are looked at."""


@dataclass(frozen=True, eq=False)
class States:
    """Sets of layers, the empty one first and the full one last, every set behind its subsets.

    Attributes:
        member: bool [S, L].
        inside: bool [S, S], whether the first is a subset of the second, or equal.
        time_s: float64 [W, S], seconds of a micro-batch, forward and backward, on each worker.
        crossing_bytes: float64 [S], activations and gradients that cross the border of a state.
        weight_bytes, resident_bytes, stash_bytes: float64 [S].
    """

    member: NDArray[np.bool_]
    inside: NDArray[np.bool_]
    time_s: NDArray[np.float64]
    crossing_bytes: NDArray[np.float64]
    weight_bytes: NDArray[np.float64]
    resident_bytes: NDArray[np.float64]
    stash_bytes: NDArray[np.float64]

    @property
    def count(self) -> int:
        return len(self.member)


def chain_states(layers: Layers) -> States:
    """The prefixes of the chain."""
    chain = layers.chain
    member = np.tri(chain.num_layers + 1, chain.num_layers, -1, dtype=bool)
    crossing = np.concatenate([[0.0], (chain.activation_bytes + chain.gradient_bytes)[:-1], [0.0]])
    return _states(layers, member, crossing)


def branch_states(problem: Problem, layers: Layers) -> States | None:
    """All sets of layers that are closed under what feeds them; None when there are more than `MAX_STATES`."""
    sets = _closed_sets(problem, layers)
    if sets is None:
        return None
    count = layers.chain.num_layers
    member = np.array([[bool(found >> layer & 1) for layer in range(count)] for found in sets], dtype=bool)
    return _states(layers, member, _crossing(problem, layers, member))


def _layer_edges(problem: Problem, layers: Layers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Layers between which forward tensors go, each pair once; what runs against the chain's order is left out."""
    of_op = layers.layer_of_group[problem.op_group]
    (maker, reader), forward = problem.op_edges, problem.op_phase == FORWARD
    kept = forward[maker] & forward[reader]
    source, target = of_op[maker[kept]], of_op[reader[kept]]
    pairs = np.unique(np.stack([source, target])[:, source < target], axis=1)
    return pairs[0], pairs[1]


def _closed_sets(problem: Problem, layers: Layers) -> list[int] | None:
    """The sets as bit masks, small ones first."""
    count = layers.chain.num_layers
    needs = [0] * count
    for source, target in zip(*(side.tolist() for side in _layer_edges(problem, layers)), strict=True):
        needs[target] |= 1 << source
    found, wave = {0}, {0}
    while wave:
        wave = {
            state | 1 << layer
            for state in wave
            for layer in range(count)
            if not state >> layer & 1 and needs[layer] & ~state == 0
        }
        found |= wave
        if len(found) > MAX_STATES:
            return None
    return sorted(found, key=lambda state: (state.bit_count(), state))


def _crossing(problem: Problem, layers: Layers, member: NDArray[np.bool_]) -> NDArray[np.float64]:
    """float64 [S], bytes of tensors with some of their ops in a state and some outside."""
    of_op = layers.layer_of_group[problem.op_group]
    tensor, reader = problem.edge_tensor, problem.consumers
    made = problem.tensor_producer[tensor]
    forward = problem.op_phase == FORWARD
    kept = (made >= 0) & (forward[reader] == forward[np.maximum(made, 0)])
    pairs = np.unique(np.stack([tensor[kept], of_op[made[kept]], of_op[reader[kept]]]), axis=1)
    apart = member[:, pairs[1]] != member[:, pairs[2]]
    result = np.zeros(len(member))
    for state, row in enumerate(apart):
        result[state] = problem.tensor_bytes[np.unique(pairs[0][row])].sum()
    return result


def _states(layers: Layers, member: NDArray[np.bool_], crossing: NDArray[np.float64]) -> States:
    chain, counts = layers.chain, member.astype(np.float64)
    seconds = chain.forward_s + chain.backward_s
    shared = counts @ counts.T
    return States(
        member=member,
        inside=shared >= counts.sum(axis=1)[:, None],
        time_s=np.ascontiguousarray((counts @ seconds).T),
        crossing_bytes=crossing,
        weight_bytes=counts @ chain.weight_bytes,
        resident_bytes=counts @ chain.resident_bytes,
        stash_bytes=counts @ chain.stash_bytes,
    )


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
        kernels.replicated_kernel(
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
