"""Records of the kernels of this package: constants of an instance, a simulated step, its analysis, and moves.

Axes: D devices, G groups, K tasks, V values, M merged edges between groups, C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.instance import PlacementInstance
from rlplace.placement.common.groupgraph import GroupGraph, finite_links
from rlplace.placement.common.oparrays import op_arrays
from rlplace.problem import Problem
from rlplace.problem.order import grouped
from rlplace.simulator.lowering import frozen_array

BINS = 64
"""Parts that the step is divided into."""

TIGHT, STRICT = range(2)
"""Two ways to call work critical, first axis of the fields that count it; see `rlplace.envs.guide.analysis.SHARPNESS`."""

STEP, BUSIEST, WORK, CHANNEL, CHAIN_WORK, CHAIN_WAIT, CHAIN_SENT, OVERFLOW = range(8)
"""Entries of `View.total`."""


class AnalysisTables(NamedTuple):
    """Constants of an instance."""

    group_s: Any  # float64 [G, D], work of each group on each device; inf where it may not sit
    mean_s: Any  # float64 [G], its mean
    task_group: Any  # int32 [K]
    input_ptr: Any  # int64 [K + 1]
    inputs: Any  # int32, values that each task reads
    output_ptr: Any  # int64 [K + 1]
    outputs: Any  # int32, values that each task makes
    producer_ptr: Any  # int64 [V + 1]
    producers: Any  # int32, tasks
    consumer_ptr: Any  # int64 [V + 1]
    consumers: Any  # int32, tasks
    owner: Any  # int32 [V], group that owns a value without producer, -1 for others
    edge_of: Any  # int32, merged edge of every consumer of a value, -1 within a group
    neighbor_ptr: Any  # int64 [G + 1]
    neighbor: Any  # int32 [2 M]
    neighbor_edge: Any  # int32 [2 M]
    neighbor_out: Any  # bool [2 M], whether the row's group is the sender
    edge_bytes: Any  # float64 [M]
    edge_count: Any  # float64 [M], values that cross
    edge_fixed_s: Any  # float64 [M], seconds of values with their own transfer times
    reader_ptr: Any  # int64 [T + 1], for the tensors that several groups read from another group
    reader_edge: Any  # int32, merged edge of each of their readers
    reader_group: Any  # int32, the group that reads
    reader_share: Any  # float64, share of the edge's bytes that the tensor is
    latency: Any  # float64 [D, D] seconds
    inverse: Any  # float64 [D, D] seconds per byte
    channel_ptr: Any  # int64 [D * D + 1], channels of every ordered pair
    channels: Any  # int32
    limit: Any  # float64 [D] bytes; inf without limit
    pinned: Any  # float64 [G] bytes that are provably live together
    footprint: Any  # float64 [G] bytes, estimate of what a group adds to a peak
    criticality: Any  # float64 [G]
    depth: Any  # float64 [G]
    order: Any  # int32 [G], depth first
    position: Any  # int64 [G], of a group in `order`


class View(NamedTuple):
    """An analysed plan, which `rlplace.envs.guide.analysis` fills. Seconds unless stated otherwise."""

    # Devices and channels.
    load: Any  # float64 [D], work on each device
    peak: Any  # float64 [D] bytes
    pinned: Any  # float64 [D] provable bytes
    channel: Any  # float64 [C], how long each channel is held
    # Groups.
    tightness: Any  # float64 [G], 1 where a delay would lengthen the step, falling with slack
    slack: Any  # float64 [G], least slack of the group's tasks
    wait: Any  # float64 [G], how long tasks waited for their device
    queue: Any  # float64 [G], how long tasks without slack wait for the device while the group runs
    urgent: Any  # float64 [G], time of the group's tasks that have no slack
    chain: Any  # float64 [G], time of the group's tasks on the critical chain
    blocked: Any  # float64 [G], waits for devices on the critical chain, of the group or behind it
    saved: Any  # float64 [G, D], delays on the critical chain that the group would remove on the device
    idle: Any  # float64 [G, D], share of the time of a group's tasks in which a device idles
    clash: Any  # float64 [2, G, D], share of the time of a group's tasks in which a device runs critical work, TIGHT and STRICT
    crowd: Any  # float64 [2, G], devices that run critical work during the group's tasks, its own left out, TIGHT and STRICT
    # Edges.
    gap: Any  # float64 [M], least time between the end of a producer and the start of its consumer
    margin: Any  # float64 [M], least time between the end of a producer and the latest start of its consumer
    sent: Any  # float64 [M], transfer time on the critical chain
    hurried: Any  # float64 [M], longest transfer without slack
    shared: Any  # float64 [M, D], share of the bytes that other readers bring to a device anyway
    part: Any  # float64 [M], share of the bytes when those that are sent for several readers are divided among them
    # The whole.
    total: Any  # float64 [8], see STEP to OVERFLOW
    # Buffers.
    arrival: Any  # float64 [V * D], -1 everywhere between calls
    late: Any  # float64 [K]
    before: Any  # int64 [K]
    free_bins: Any  # float64 [D, BINS]
    critical_bins: Any  # float64 [2, D, BINS]


class SimulatedStep(NamedTuple):
    """A simulated plan."""

    start_s: Any  # float64 [K], of every task
    end_s: Any  # float64 [K]
    transfer: Any  # records of `rlplace.simulator.records.TRANSFER`, those of this step
    peak_bytes: Any  # int64 [D]
    step_s: Any  # step time
    overflow: Any  # relative memory overflow


class MoveSet(NamedTuple):
    """Up to K moves: sets of groups with the device that each of them goes to."""

    ptr: Any  # int64 [K + 1], offsets into `groups` and `targets`
    groups: Any  # int32
    targets: Any  # int32
    kinds: Any  # int8 [K], see `rlplace.envs.guide.draw`


def analysis_tables(instance: PlacementInstance) -> AnalysisTables:
    """Returns the arrays of an instance."""
    problem, graph = instance.problem, instance.graph
    produced = np.flatnonzero(problem.tensor_producer >= 0)
    latency, inverse = finite_links(problem)
    arrays = op_arrays(problem)
    edge_of, readers = _edges(problem, graph)
    fields = AnalysisTables(
        group_s=graph.time_s,
        mean_s=graph.mean_time_s,
        task_group=problem.op_group,
        **_lists("input", problem.edge_tensor, problem.consumers, problem.num_ops),
        **_lists("output", produced, problem.tensor_producer[produced], problem.num_ops),
        producer_ptr=np.concatenate([[0], np.cumsum(problem.tensor_producer >= 0)]),
        producers=problem.tensor_producer[produced],
        consumer_ptr=problem.consumer_ptr,
        consumers=problem.consumers,
        owner=problem.tensor_owner,
        edge_of=edge_of,
        neighbor_ptr=graph.neighbor_ptr,
        neighbor=graph.neighbor,
        neighbor_edge=graph.neighbor_edge,
        neighbor_out=graph.neighbor_out,
        edge_bytes=graph.edge_bytes,
        edge_count=graph.edge_count,
        edge_fixed_s=graph.edge_fixed_s,
        **readers,
        latency=latency,
        inverse=inverse,
        channel_ptr=arrays.channel_ptr,
        channels=arrays.channels,
        limit=np.maximum(instance.limit_bytes, 1.0),
        pinned=instance.pinned_bytes,
        footprint=graph.footprint_bytes,
        criticality=instance.criticality,
        depth=instance.depth,
        order=graph.depth_first_order,
        position=instance.position,
    )
    return AnalysisTables(*(_frozen(name, value) for name, value in fields._asdict().items()))


def _lists(name: str, tensors: NDArray[Any], ops: NDArray[np.int32], count: int) -> dict[str, Any]:
    """Returns the tensors listed beside every op."""
    starts, values = grouped(ops, tensors, count)
    return {f"{name}_ptr": starts, f"{name}s": values}


def _edges(problem: Problem, graph: GroupGraph) -> tuple[NDArray[np.int32], dict[str, Any]]:
    """Returns the merged edge of every consumer of a value, and readers."""
    tensor, groups = problem.edge_tensor.astype(np.int64), problem.num_groups
    source = problem.edge_source_group.astype(np.int64)
    target = problem.op_group[problem.consumers].astype(np.int64)
    apart = source != target
    edge_of = np.full(len(tensor), -1, dtype=np.int32)
    known = graph.source.astype(np.int64) * groups + graph.target
    edge_of[apart] = np.searchsorted(known, (source * groups + target)[apart])
    _, first = np.unique(tensor[apart] * groups + target[apart], return_index=True)
    return edge_of, _readers(graph.target, edge_of[apart][first], tensor[apart][first], problem.tensor_bytes)


def _readers(
    target: NDArray[np.int32], edge: NDArray[np.int32], tensor: NDArray[np.int32], size: NDArray[np.int64]
) -> dict[str, Any]:
    """Returns the readers of tensors that several groups read; rows (edge, tensor) are distinct."""
    rows = np.unique(np.stack([tensor, edge], axis=1).astype(np.int64), axis=0)
    tensors, edges = rows[:, 0], rows[:, 1]
    weight = np.maximum(size[tensors].astype(np.float64), 1.0)
    share = weight / np.maximum(np.bincount(edges, weights=weight, minlength=len(target)), 1.0)[edges]
    _, number, readers = np.unique(tensors, return_inverse=True, return_counts=True)
    several = readers[number] > 1 if len(number) else np.zeros(0, dtype=bool)
    ptr = np.concatenate([[0], np.cumsum(readers[readers > 1])])
    edges = edges[several]
    return {"reader_ptr": ptr, "reader_edge": edges, "reader_group": target[edges], "reader_share": share[several]}


_WIDE = ("_ptr", "position")


def _frozen(name: str, value: Any) -> Any:
    """Returns one type per array for the compiler."""
    if value.dtype.kind == "b":
        dtype: Any = np.bool_
    elif value.dtype.kind == "f" or name == "footprint":
        dtype = np.float64
    else:
        dtype = np.int64 if name.endswith(_WIDE) else np.int32
    return frozen_array(value, dtype)


def make_view(tables: AnalysisTables) -> View:
    """Returns buffers for an instance."""
    groups, devices = tables.group_s.shape
    tasks, values, edges = len(tables.task_group), len(tables.consumer_ptr) - 1, len(tables.edge_bytes)
    sizes = {
        "channel": int(tables.channels.max(initial=0)) + 1, "total": 8, "arrival": values * devices,
        "late": tasks, "before": tasks,
        **dict.fromkeys(("load", "peak", "pinned"), devices),
        **dict.fromkeys(("tightness", "slack", "wait", "queue", "urgent", "chain", "blocked"), groups),
        **dict.fromkeys(("saved", "idle"), (groups, devices)),
        **dict.fromkeys(("gap", "margin", "sent", "hurried", "part"), edges),
        "shared": (edges, devices),
        "clash": (2, groups, devices), "crowd": (2, groups), "free_bins": (devices, BINS), "critical_bins": (2, devices, BINS),
    }  # fmt: skip
    view = View(**{name: np.zeros(size, dtype=np.int64 if name == "before" else np.float64) for name, size in sizes.items()})
    view.arrival[:] = -1.0
    return view
