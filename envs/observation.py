"""Observations: the small changing state of an environment, and optionally the whole graph.

An observation names its graph by number. With ``observation="full"`` the graph's arrays are part of every observation.

K candidates, F features of each (every environment has its own), G = `max_groups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.envs.guide.features import CLIP
from rlplace.envs.instance import PlacementInstance

NUM_CONTEXT = 8
NODE_FEATURES = (
    "log_work",  # log of the mean time over the mean group's
    "work",  # mean time over the ideal step time
    "log_sent",  # log of the transfer seconds of what it sends, over a mean link
    "log_received",  # of what it receives
    "pinned",  # provable bytes over the smallest memory; 0 without limits
    "footprint",  # the same for its largest op
    "criticality",  # longest path through it over the longest path
    "depth",  # where in the step it starts
    "degree",  # log of its number of neighbours
    "forward",  # whether it has forward ops
)
"""Columns of `nodes` with ``observation="full"``."""
EDGE_FEATURES = ("log_seconds", "log_over_work")
"""Columns of `edge_features`: transfer time over a mean link, over the ideal step time and over the producer's own time."""
NUM_NODE_FEATURES = len(NODE_FEATURES)
MAX_PROBLEMS = 1 << 20


def observation_space(max_groups: int, candidates: int, features: int, full: bool) -> spaces.Dict:
    """Returns the flat Dict of Box that both environments observe; tables are flattened row by row, as SB3 recommends.

    Args:
        max_groups: G, number of groups in the spaces.
        candidates: K, number of candidates.
        features: F, features of a candidate.
        full: Whether the graph is part of every observation.
    """
    boxes: dict[str, spaces.Space[Any]] = {
        "graph": spaces.Box(0, MAX_PROBLEMS, (1,), np.int32),
        "device_of_group": spaces.Box(-1, 4096, (max_groups,), np.int32),
        "candidates": spaces.Box(-CLIP, CLIP, (candidates * features,), np.float32),
        "candidate_group": spaces.Box(-1, max_groups, (candidates,), np.int32),
        "context": spaces.Box(-CLIP, CLIP, (NUM_CONTEXT,), np.float32),
    }
    if full:
        edges = 8 * max_groups
        boxes["nodes"] = spaces.Box(-CLIP, CLIP, (max_groups * NUM_NODE_FEATURES,), np.float32)
        boxes["edges"] = spaces.Box(-1, max_groups, (2 * edges,), np.int32)
        boxes["edge_features"] = spaces.Box(-CLIP, CLIP, (2 * edges,), np.float32)
    return spaces.Dict(boxes)


def load_and_pinned(
    instance: PlacementInstance, device_of_group: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns work in seconds and provable bytes of the placed groups on each device, both float64 [D]."""
    devices = instance.problem.num_devices
    placed = np.flatnonzero(device_of_group >= 0)
    where = device_of_group[placed]
    load: NDArray[Any] = np.bincount(where, weights=instance.graph.time_s[placed, where], minlength=devices)
    pinned: NDArray[Any] = np.bincount(where, weights=instance.pinned_bytes[placed], minlength=devices)
    return load, pinned


def memory_pressure(instance: PlacementInstance) -> float:
    """Returns the provable bytes of all groups over the memory of all devices; 0 when some device has no limit."""
    capacity = float(instance.limit_bytes.sum())
    return float(instance.pinned_bytes.sum()) / capacity if np.isfinite(capacity) and capacity > 0 else 0.0


def static_context(instance: PlacementInstance) -> list[float]:
    """Returns the first entries of `context`: devices, groups and memory pressure."""
    problem = instance.problem
    return [problem.num_devices / 8.0, float(np.log2(problem.num_groups + 1.0)) / 8.0, memory_pressure(instance)]


def context_vector(instance: PlacementInstance, changing: Sequence[float]) -> NDArray[np.float32]:
    """Returns the `context` of an observation: devices, groups and memory pressure, then what the environment adds, then zeros.

    Args:
        instance: The instance.
        changing: The environment's own entries.
    """
    static = static_context(instance)
    values = np.zeros(NUM_CONTEXT, dtype=np.float32)
    values[: len(static) + len(changing)] = np.clip([*static, *changing], -CLIP, CLIP)
    return values


def node_features(instance: PlacementInstance) -> NDArray[np.float32]:
    """Returns float32 [G, `NUM_NODE_FEATURES`], static facts of every group, free of units."""
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


def edge_features(instance: PlacementInstance) -> NDArray[np.float32]:
    """Returns float32 [E, 2], transfer time over a mean link: over the ideal step time, and over the producer's own time."""
    seconds = instance.graph.edge_bytes * _mean_seconds_per_byte(instance)
    own = np.maximum(instance.graph.mean_time_s[instance.graph.source], 1e-12)
    pair = np.stack([np.log1p(seconds / instance.ideal_s * 50.0), np.log1p(seconds / own)], axis=1)
    return np.clip(pair, -CLIP, CLIP).astype(np.float32)


class GraphArrays(NamedTuple):
    """The arrays of an instance that a graph network reads.

    Attributes:
        nodes: float32 [G, `NUM_NODE_FEATURES`].
        source, target: int64 [E], groups.
        values: float32 [E, 2], `EDGE_FEATURES`.
    """

    nodes: Any
    source: Any
    target: Any
    values: Any


def graph_arrays(instance: PlacementInstance) -> GraphArrays:
    """Returns the arrays of an instance."""
    graph = instance.graph
    source, target = graph.source.astype(np.int64), graph.target.astype(np.int64)
    return GraphArrays(node_features(instance), source, target, edge_features(instance))


def full_graph(instance: PlacementInstance, max_groups: int) -> dict[str, NDArray[Any]]:
    """Returns padded and flattened graph arrays for ``observation="full"``; padding is 0 for features and -1 for edges."""
    nodes = np.zeros((max_groups, NUM_NODE_FEATURES), dtype=np.float32)
    nodes[: instance.problem.num_groups] = node_features(instance)
    edges = np.full((8 * max_groups, 2), -1, dtype=np.int32)
    values = np.zeros((8 * max_groups, 2), dtype=np.float32)
    kept = np.argsort(-instance.graph.edge_bytes, kind="stable")[: 8 * max_groups]  # the heaviest, where there are too many
    edges[: len(kept), 0], edges[: len(kept), 1] = instance.graph.source[kept], instance.graph.target[kept]
    values[: len(kept)] = edge_features(instance)[kept]
    return {"nodes": nodes.ravel(), "edges": edges.ravel(), "edge_features": values.ravel()}


def _mean_seconds_per_byte(instance: PlacementInstance) -> float:
    off = ~np.eye(instance.problem.num_devices, dtype=bool)
    rates = instance.seconds_per_byte[off]
    rates = rates[np.isfinite(rates)]
    return float(rates.mean()) if len(rates) else 0.0
