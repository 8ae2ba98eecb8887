"""Records of the kernels of this package: constants of an instance, a simulated step, its analysis, and moves.

Axes: D devices, G groups, K tasks, V values, M merged edges between groups, C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.arrays import Array, buffers, constants
from rlplace.envs.instance import PlacementInstance
from rlplace.placement.common.groupgraph import GroupGraph
from rlplace.placement.common.oparrays import op_arrays
from rlplace.problem import Problem
from rlplace.simulator.lowering import lower

BINS = 64
"""Parts that the step is divided into."""

TIGHT, STRICT = range(2)
"""Two ways to call work critical, first axis of the fields that count it; see `rlplace.envs.guide.analysis.SHARPNESS`."""

STEP, BUSIEST, WORK, CHANNEL, CHAIN_WORK, CHAIN_WAIT, CHAIN_SENT, OVERFLOW = range(8)
"""Entries of `View.total`."""


class AnalysisTables(NamedTuple):
    """Constants of an instance."""

    time_s: Any = Array("float64", "G D")  # work of each group on each device; inf where it may not sit
    mean_time_s: Any = Array("float64", "G")  # its mean
    op_group: Any = Array("int32", "K")
    input_ptr: Any = Array("int64", "K+1")
    inputs: Any = Array("int32", ".")  # values that each task reads
    output_ptr: Any = Array("int64", "K+1")
    outputs: Any = Array("int32", ".")  # values that each task makes
    producer_ptr: Any = Array("int64", "V+1")
    producers: Any = Array("int32", ".")  # tasks
    consumer_ptr: Any = Array("int64", "V+1")
    consumers: Any = Array("int32", ".")  # tasks
    tensor_owner: Any = Array("int32", "V")  # group that owns a value without producer, -1 for others
    edge_of: Any = Array("int32", ".")  # merged edge of every consumer of a value, -1 within a group
    neighbor_ptr: Any = Array("int64", "G+1")
    neighbor: Any = Array("int32", "2*M")
    neighbor_edge: Any = Array("int32", "2*M")
    neighbor_out: Any = Array("bool", "2*M")  # whether the row's group is the sender
    edge_bytes: Any = Array("float64", "M")
    edge_count: Any = Array("float64", "M")  # values that cross
    edge_fixed_s: Any = Array("float64", "M")  # seconds of values with their own transfer times
    reader_ptr: Any = Array("int64", "T+1")  # for the tensors that several groups read from another group
    reader_edge: Any = Array("int32", ".")  # merged edge of each of their readers
    reader_group: Any = Array("int32", ".")  # the group that reads
    reader_share: Any = Array("float64", ".")  # share of the edge's bytes that the tensor is
    latency: Any = Array("float64", "D D")  # seconds
    inverse: Any = Array("float64", "D D")  # seconds per byte
    channel_ptr: Any = Array("int64", "D*D+1")  # channels of every ordered pair
    channels: Any = Array("int32", ".")
    limit: Any = Array("float64", "D")  # bytes; inf without limit
    pinned_bytes: Any = Array("float64", "G")  # bytes that are provably live together
    footprint: Any = Array("float64", "G")  # bytes, estimate of what a group adds to a peak
    criticality: Any = Array("float64", "G")
    depth: Any = Array("float64", "G")
    depth_first_order: Any = Array("int32", "G")
    position: Any = Array("int64", "G")  # of a group in that order
    ranks: Any = Array("uint32", "2 K")  # by the default priority: rank of every task, and task of every rank


class View(NamedTuple):
    """An analysed plan, which `rlplace.envs.guide.analysis` fills. Seconds unless stated otherwise."""

    # Devices and channels.
    load: Any = Array("float64", "D")  # work on each device
    peak: Any = Array("float64", "D")  # bytes
    pinned: Any = Array("float64", "D")  # provable bytes
    channel: Any = Array("float64", "C")  # how long each channel is held
    # Groups.
    tightness: Any = Array("float64", "G")  # 1 where a delay would lengthen the step, falling with slack
    slack: Any = Array("float64", "G")  # least slack of the group's tasks
    wait: Any = Array("float64", "G")  # how long tasks waited for their device
    queue: Any = Array("float64", "G")  # how long tasks without slack wait for the device while the group runs
    urgent: Any = Array("float64", "G")  # time of the group's tasks that have no slack
    chain: Any = Array("float64", "G")  # time of the group's tasks on the critical chain
    blocked: Any = Array("float64", "G")  # waits for devices on the critical chain, of the group or behind it
    saved: Any = Array("float64", "G D")  # delays on the critical chain that the group would remove on the device
    idle: Any = Array("float64", "G D")  # share of the time of a group's tasks in which a device idles
    # TIGHT and STRICT: share of the time of a group's tasks in which a device runs critical work, and sum over other devices.
    clash: Any = Array("float64", "2 G D")
    crowd: Any = Array("float64", "2 G")
    # Edges.
    gap: Any = Array("float64", "M")  # least time between the end of a producer and the start of its consumer
    margin: Any = Array("float64", "M")  # least time between the end of a producer and the latest start of its consumer
    sent: Any = Array("float64", "M")  # transfer time on the critical chain
    hurried: Any = Array("float64", "M")  # longest transfer without slack
    shared: Any = Array("float64", "M D")  # share of the bytes that other readers bring to a device anyway
    part: Any = Array("float64", "M")  # share of the bytes when what is sent for several readers is divided among them
    # The whole.
    total: Any = Array("float64", "8")  # see STEP to OVERFLOW
    # Buffers.
    arrival: Any = Array("float64", "V*D", -1)  # -1 everywhere between calls
    late: Any = Array("float64", "K")
    before: Any = Array("int64", "K")
    free_bins: Any = Array("float64", "D B")
    critical_bins: Any = Array("float64", "2 D B")


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
    made = problem.tensor_producer >= 0
    edge_of, readers = _edges(problem, graph)
    columns = {
        **op_arrays(problem)._asdict(),
        **instance.columns(),
        **readers,
        "producer_ptr": np.concatenate([[0], np.cumsum(made)]),
        "producers": problem.tensor_producer[made],
        "tensor_owner": problem.tensor_owner,
        "edge_of": edge_of,
        "ranks": lower(problem).ranks,
        "limit": np.maximum(instance.limit_bytes, 1.0),
    }
    tables: AnalysisTables = constants(AnalysisTables, **columns)
    return tables


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


def make_view(tables: AnalysisTables) -> View:
    """Returns buffers for an instance."""
    groups, devices = tables.time_s.shape
    sizes = {"K": len(tables.op_group), "V": len(tables.consumer_ptr) - 1, "C": int(tables.channels.max(initial=0)) + 1}
    view: View = buffers(View, G=groups, D=devices, M=len(tables.edge_bytes), B=BINS, **sizes)
    return view
