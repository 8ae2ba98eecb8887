"""A problem as flat arrays for list-scheduling planners (`heft`, `m_etf`, `critical_path`), and upward ranks.

Axes: D devices, G groups, N ops, T tensors, E tensor-to-consumer pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.arrays import Array, constants
from rlplace.memoized import memoized
from rlplace.placement.common import listkernels
from rlplace.placement.common.groupgraph import finite_links, finite_mean, group_graph, mean_transfer_s
from rlplace.problem import Problem
from rlplace.problem.order import grouped


class OpArrays(NamedTuple):
    """The arrays of a problem that list schedulers read."""

    time_s: Any = Array("float64", "N D")  # inf where the op's group may not sit
    op_group: Any = Array("int32", "N")
    input_ptr: Any = Array("int64", "N+1")
    inputs: Any = Array("int32", "E")  # tensors that each op reads
    producer: Any = Array("int32", "T")  # -1 for an owner's tensor
    holder: Any = Array("int32", "T")  # group that makes or owns the tensor
    consumer_ptr: Any = Array("int64", "T+1")
    consumers: Any = Array("int32", "E")
    size: Any = Array("float64", "T")  # bytes
    table: Any = Array("int32", "T")  # row of `tables`, -1 where latency + bytes / bandwidth applies
    tables: Any = Array("float64", ". D D")  # seconds
    latency: Any = Array("float64", "D D")  # seconds
    inverse: Any = Array("float64", "D D")  # seconds per byte
    channel_ptr: Any = Array("int64", "D*D+1")
    channels: Any = Array("int32", ".")  # channels of every ordered pair, renumbered from 0
    footprint: Any = Array("int64", "G")
    order: Any = Array("int32", "N")  # topological
    output_ptr: Any = Array("int64", "N+1")
    outputs: Any = Array("int32", ".")  # tensors that each op makes
    num_made_inputs: Any = Array("int64", "N")  # inputs that other ops make


def upward_rank(problem: Problem, *, communication: bool) -> NDArray[np.float64]:
    """Returns float64 [N], mean time of an op plus the longest mean time to the end of the step after it.

    Args:
        problem: The problem.
        communication: Whether an edge between two groups counts with its mean transfer time, as in HEFT.
    """
    a = op_arrays(problem)
    edge = mean_transfer_s(problem) if communication else np.zeros(problem.num_tensors)
    rank = np.zeros(problem.num_ops)
    listkernels.upward_rank_kernel(a, finite_mean(a.time_s), edge, rank)
    return rank


def empty_schedule(problem: Problem, subset: Sequence[int], room: NDArray[np.float64]) -> listkernels.ListSchedule:
    """Returns a schedule on some devices, without any op; `room` [D] bytes may be planned, and change."""
    ops, count = problem.num_ops, problem.num_devices
    return listkernels.ListSchedule(
        mask=np.isin(np.arange(count), subset),
        devices=np.full(problem.num_groups, -1, dtype=np.int32),
        room=room,
        start=np.zeros(ops),
        finish=np.zeros(ops),
        arrival=np.full((problem.num_tensors, count), -1.0),
        channel_free=np.zeros(int(op_arrays(problem).channels.max(initial=-1)) + 1),
    )


def place_rest(problem: Problem, devices: NDArray[np.int32], room: NDArray[np.float64]) -> None:
    """Places groups without a device (-1) where most room is left: groups without ops are in no schedule."""
    footprint = group_graph(problem).footprint_bytes
    for group in np.flatnonzero(devices < 0):
        devices[group] = int(np.where(problem.group_allowed[group], room, -np.inf).argmax())
        room[devices[group]] -= float(footprint[group])


def by_rank(problem: Problem, rank: NDArray[np.float64]) -> NDArray[np.int32]:
    """Returns int32 [N], ops by falling rank, producers always before consumers."""
    position = np.argsort(problem.topological_order)
    return np.lexsort((position, -rank)).astype(np.int32)


@memoized
def op_arrays(problem: Problem) -> OpArrays:
    """Returns the arrays of a problem, built on first use and kept while the problem lives."""
    input_ptr, inputs = grouped(problem.consumers, problem.edge_tensor, problem.num_ops)
    table = np.full(problem.num_tensors, -1, dtype=np.int32)
    count = problem.num_devices
    tables = np.zeros((len(problem.tensor_transfer_s), count, count))
    for row, (tensor, matrix) in enumerate(problem.tensor_transfer_s.items()):
        table[tensor], tables[row] = row, matrix
    latency, inverse = finite_links(problem)
    held = [channels for row in problem.links.effective_channels for channels in row]
    number = {channel: i for i, channel in enumerate(sorted({c for channels in held for c in channels}))}
    produced = np.flatnonzero(problem.tensor_producer >= 0)
    output_ptr, outputs = grouped(problem.tensor_producer[produced], produced, problem.num_ops)
    arrays: OpArrays = constants(
        OpArrays,
        time_s=np.where(problem.group_allowed[problem.op_group], problem.time_s, np.inf),
        op_group=problem.op_group,
        input_ptr=input_ptr,
        inputs=inputs,
        producer=problem.tensor_producer,
        holder=problem.tensor_group,
        consumer_ptr=problem.consumer_ptr,
        consumers=problem.consumers,
        size=problem.tensor_bytes.astype(np.float64),
        table=table,
        tables=tables,
        latency=latency,
        inverse=inverse,
        channel_ptr=np.concatenate([[0], np.cumsum([len(channels) for channels in held])]),
        channels=np.array([number[c] for channels in held for c in channels]),
        footprint=group_graph(problem).footprint_bytes,
        order=problem.topological_order,
        output_ptr=output_ptr,
        outputs=outputs,
        num_made_inputs=np.bincount(problem.op_edges[1], minlength=problem.num_ops),
    )
    return arrays
