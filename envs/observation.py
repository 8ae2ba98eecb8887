"""Observations: the small changing state of an environment, and optionally the whole graph.

The static graph stays in a bank beside the policy (`rlplace.agents.bank`); an observation names it by number. With
``observation="full"`` the graph's arrays are part of every observation, for policies that know no bank.

K candidates, F = `NUM_FEATURES` features, G = `max_groups`, A = `max_edges`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.envs.features import (
    CLIP,
    NUM_FEATURES,
    TIME_BINS,
    candidate_features,
    idle_profile,
    no_window,
    realised_slack,
)
from rlplace.envs.instance import Instance
from rlplace.envs.moves import Moves
from rlplace.planners.common.oparrays import op_arrays
from rlplace.simulator.timeline import Timeline

NUM_CONTEXT = 8
NUM_NODE_FEATURES = 10
MAX_PROBLEMS = 1 << 20


@dataclass(frozen=True, eq=False)
class State:
    """What features are computed from.

    Attributes:
        device_of_group: int32 [G], -1 where not placed.
        load_s: float64 [D]. pinned_bytes: float64 [D]. peak_bytes: float64 [D], 0 where unknown.
        tightness: float64 [G]. window: int32 [G, 2]. idle: float64 [D, TIME_BINS].
    """

    device_of_group: NDArray[np.int32]
    load_s: NDArray[np.float64]
    pinned_bytes: NDArray[np.float64]
    peak_bytes: NDArray[np.float64]
    tightness: NDArray[np.float64]
    window: NDArray[np.int32]
    idle: NDArray[np.float64]


def observation_space(max_groups: int, candidates: int, full: bool) -> spaces.Dict:
    """The flat Dict of Box that both environments observe; tables are flattened row by row, as SB3 recommends."""
    boxes: dict[str, spaces.Space[Any]] = {
        "graph": spaces.Box(0, MAX_PROBLEMS, (1,), np.int32),
        "device_of_group": spaces.Box(-1, 4096, (max_groups,), np.int32),
        "candidates": spaces.Box(-CLIP, CLIP, (candidates * NUM_FEATURES,), np.float32),
        "candidate_group": spaces.Box(-1, max_groups, (candidates,), np.int32),
        "context": spaces.Box(-CLIP, CLIP, (NUM_CONTEXT,), np.float32),
    }
    if full:
        edges = 8 * max_groups
        boxes["nodes"] = spaces.Box(-CLIP, CLIP, (max_groups * NUM_NODE_FEATURES,), np.float32)
        boxes["edges"] = spaces.Box(-1, max_groups, (2 * edges,), np.int32)
        boxes["edge_features"] = spaces.Box(-CLIP, CLIP, (2 * edges,), np.float32)
    return spaces.Dict(boxes)


def placed_state(instance: Instance, timeline: Timeline, device_of_group: NDArray[np.int32]) -> State:
    """The state of a complete plan; slack and idleness are those of its last micro-batch."""
    problem, timeline = instance.problem, timeline.last_microbatch()
    load, pinned = load_and_pinned(instance, device_of_group)
    if timeline.step_time_s is None:
        return State(
            device_of_group, load, pinned, timeline.peak_memory_bytes.astype(np.float64), np.ones(problem.num_groups),
            no_window(problem.num_groups), np.zeros((problem.num_devices, TIME_BINS)),
        )  # fmt: skip
    slack = _slack(instance, timeline)
    tightness = np.zeros(problem.num_groups)
    np.maximum.at(tightness, problem.op_group, 1.0 / (1.0 + 20.0 * np.maximum(slack, 0.0) / max(timeline.step_time_s, 1e-30)))
    idle, window = np.ones((problem.num_devices, TIME_BINS)), np.zeros((problem.num_groups, 2), dtype=np.int32)
    window[:, 0] = TIME_BINS - 1
    idle_profile(
        timeline.start_s, timeline.end_s, timeline.device_of_op, op_arrays(problem).op_group, timeline.step_time_s, idle, window
    )  # fmt: skip
    np.maximum(idle, 0.0, out=idle)
    peaks = timeline.peak_memory_bytes.astype(np.float64)
    return State(device_of_group, load, pinned, peaks, tightness, window, idle)


def load_and_pinned(instance: Instance, device_of_group: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Work in seconds and provable bytes of the placed groups on each device, both float64 [D]."""
    devices = instance.problem.num_devices
    placed = np.flatnonzero(device_of_group >= 0)
    where = device_of_group[placed]
    load: NDArray[Any] = np.bincount(where, weights=instance.graph.time_s[placed, where], minlength=devices)
    pinned: NDArray[Any] = np.bincount(where, weights=instance.pinned_bytes[placed], minlength=devices)
    return load, pinned


def features(
    instance: Instance, state: State, moves: Moves, finish_delay_s: NDArray[np.float64] | None = None
) -> NDArray[np.float32]:
    """float32 [K, F], the features of K candidates."""
    count = len(moves.device)
    out = np.zeros((count, NUM_FEATURES), dtype=np.float32)
    graph, limit = instance.graph, np.maximum(instance.limit_bytes, 1.0)
    candidate_features(
        moves.ptr, moves.groups, moves.device, moves.saving_s, np.zeros(count) if finish_delay_s is None else finish_delay_s,
        state.device_of_group, state.load_s, state.pinned_bytes, state.peak_bytes, state.tightness, state.window, state.idle,
        limit, graph.time_s, graph.mean_time_s, instance.pinned_bytes, graph.neighbor_ptr, graph.neighbor,
        instance.neighbor_bytes, instance.seconds_per_byte, instance.latency_s, instance.criticality, instance.depth,
        instance.ideal_s, np.zeros(instance.problem.num_groups, dtype=np.bool_), out,
    )  # fmt: skip
    return out


def node_features(instance: Instance) -> NDArray[np.float32]:
    """float32 [G, `NUM_NODE_FEATURES`], static facts of every group, free of units."""
    problem = instance.problem
    scale = max(float(instance.graph.mean_time_s.sum()), 1e-30)
    groups = problem.num_groups
    sent = np.bincount(instance.graph.source, weights=instance.graph.edge_bytes, minlength=groups)
    received = np.bincount(instance.graph.target, weights=instance.graph.edge_bytes, minlength=groups)
    rate = _mean_seconds_per_byte(instance)
    limit = max(float(np.min(instance.limit_bytes)), 1.0) if np.isfinite(instance.limit_bytes).any() else np.inf
    degree = np.diff(instance.graph.neighbor_ptr).astype(np.float64)
    forward = np.bincount(problem.op_group, weights=problem.op_phase == 0, minlength=groups)
    columns = [
        np.log1p(instance.graph.mean_time_s / scale * groups),
        instance.graph.mean_time_s / instance.ideal_s,
        np.log1p(sent * rate / instance.ideal_s * groups),
        np.log1p(received * rate / instance.ideal_s * groups),
        instance.pinned_bytes / limit if np.isfinite(limit) else np.zeros(groups),
        instance.footprint_bytes / limit if np.isfinite(limit) else np.zeros(groups),
        instance.criticality,
        instance.depth,
        np.log1p(degree) / 3.0,
        forward > 0,
    ]
    return np.clip(np.stack(columns, axis=1), -CLIP, CLIP).astype(np.float32)


def edge_features(instance: Instance) -> NDArray[np.float32]:
    """float32 [E, 2], transfer time over a mean link: over the ideal step time, and over the producer's own time."""
    seconds = instance.graph.edge_bytes * _mean_seconds_per_byte(instance)
    own = np.maximum(instance.graph.mean_time_s[instance.graph.source], 1e-12)
    pair = np.stack([np.log1p(seconds / instance.ideal_s * 50.0), np.log1p(seconds / own)], axis=1)
    return np.clip(pair, -CLIP, CLIP).astype(np.float32)


def full_graph(instance: Instance, max_groups: int) -> dict[str, NDArray[Any]]:
    """Padded and flattened graph arrays for ``observation="full"``; padding is 0 for features and -1 for edges."""
    nodes = np.zeros((max_groups, NUM_NODE_FEATURES), dtype=np.float32)
    nodes[: instance.problem.num_groups] = node_features(instance)
    edges = np.full((8 * max_groups, 2), -1, dtype=np.int32)
    values = np.zeros((8 * max_groups, 2), dtype=np.float32)
    kept = np.argsort(-instance.graph.edge_bytes, kind="stable")[: 8 * max_groups]  # the heaviest, where there are too many
    edges[: len(kept), 0], edges[: len(kept), 1] = instance.graph.source[kept], instance.graph.target[kept]
    values[: len(kept)] = edge_features(instance)[kept]
    return {"nodes": nodes.ravel(), "edges": edges.ravel(), "edge_features": values.ravel()}


def _mean_seconds_per_byte(instance: Instance) -> float:
    off = ~np.eye(instance.problem.num_devices, dtype=bool)
    rates = instance.seconds_per_byte[off]
    rates = rates[np.isfinite(rates)]
    return float(rates.mean()) if len(rates) else 0.0


def _slack(instance: Instance, timeline: Timeline) -> NDArray[np.float64]:
    problem = instance.problem
    arrays = op_arrays(problem)
    lag = np.zeros((problem.num_tensors, problem.num_devices))
    sent = problem.tensor_producer[timeline.transfer_tensor]
    ready = np.where(sent >= 0, timeline.end_s[np.maximum(sent, 0)], 0.0)
    lag[timeline.transfer_tensor, timeline.transfer_destination] = timeline.transfer_end_s - ready
    order_by_end = np.lexsort((timeline.start_s, timeline.end_s))
    step = timeline.step_time_s if timeline.step_time_s is not None else 0.0
    late_end = np.full(problem.num_ops, step)
    realised_slack(
        order_by_end, timeline.start_s, timeline.end_s, timeline.device_of_op, arrays.output_ptr, arrays.outputs,
        arrays.consumer_ptr, arrays.consumers, lag, late_end, np.full(problem.num_devices, step),
    )  # fmt: skip
    return late_end - timeline.end_s
