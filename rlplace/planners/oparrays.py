"""A problem as flat arrays for list-scheduling planners (`heft`, `m_etf`, `critical_path`), and upward ranks.

Axes: D devices, G groups, N ops, T tensors, E tensor-to-consumer pairs.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rlplace.planners.groupgraph import finite_links, group_graph, mean_link
from rlplace.problem import Problem


class OpArrays(NamedTuple):
    """What a list scheduler reads; a plain tuple of arrays, so that compiled code takes it as it is."""

    time_s: Any  # float64 [N, D], inf where the op's group may not sit
    op_group: Any  # int32 [N]
    input_ptr: Any  # int64 [N + 1]
    inputs: Any  # int32 [E], tensors that each op reads
    producer: Any  # int32 [T], -1 for an owner's tensor
    owner: Any  # int32 [T], -1 for an op's tensor
    consumer_ptr: Any  # int64 [T + 1]
    consumers: Any  # int32 [E]
    size: Any  # float64 [T] bytes
    table: Any  # int32 [T], row of `tables`, -1 where latency + bytes / bandwidth applies
    tables: Any  # float64 [., D, D] seconds
    latency: Any  # float64 [D, D] seconds
    inverse: Any  # float64 [D, D] seconds per byte
    channel_ptr: Any  # int64 [D * D + 1]
    channels: Any  # int32 [.], channels of every ordered pair, renumbered from 0
    footprint: Any  # int64 [G]
    order: Any  # int32 [N], topological


_CACHE: WeakKeyDictionary[Problem, OpArrays] = WeakKeyDictionary()


def op_arrays(problem: Problem) -> OpArrays:
    """The arrays of a problem, built on first use and kept while the problem lives."""
    found = _CACHE.get(problem)
    if found is None:
        found = _CACHE[problem] = _build(problem)
    return found


def upward_rank(problem: Problem, *, communication: bool) -> NDArray[np.float64]:
    """float64 [N], mean time of an op plus the longest mean time to the end of the step after it.

    Args:
        problem: The problem.
        communication: Whether an edge between two groups counts with its mean transfer time, as in HEFT.
    """
    a = op_arrays(problem)
    latency, inverse = mean_link(problem)
    edge = np.zeros(problem.num_tensors)
    if communication and problem.num_devices > 1:
        edge = latency + a.size * inverse
        off = ~np.eye(problem.num_devices, dtype=bool)
        for tensor, matrix in problem.tensor_transfer_s.items():
            edge[tensor] = matrix[off].mean()
    finite = np.isfinite(a.time_s)
    mean = np.where(finite, a.time_s, 0.0).sum(axis=1) / np.maximum(finite.sum(axis=1), 1)
    rank: NDArray[np.float64] = _rank(a.order, mean, edge, a.op_group, a.input_ptr, a.inputs, a.producer)
    return rank


def by_rank(problem: Problem, rank: NDArray[np.float64]) -> NDArray[np.int32]:
    """int32 [N], ops by falling rank, producers always before consumers."""
    position = np.empty(problem.num_ops, dtype=np.int64)
    position[problem.topological_order] = np.arange(problem.num_ops)
    return np.lexsort((position, -rank)).astype(np.int32)


@njit(cache=True)
def _rank(order, mean, edge, op_group, input_ptr, inputs, producer):
    below = np.zeros(len(order))
    for i in range(len(order) - 1, -1, -1):
        op = order[i]
        below[op] += mean[op]
        for k in range(input_ptr[op], input_ptr[op + 1]):
            source = producer[inputs[k]]
            if source >= 0:
                cost = 0.0 if op_group[source] == op_group[op] else edge[inputs[k]]
                below[source] = max(below[source], cost + below[op])
    return below


@njit(cache=True)
def arrival_time(a, tensor, device, devices, finish, arrival, channel_free, contention):
    """When a tensor can be present on a device, and where it comes from (-1 when no transfer is needed)."""
    (_, op_group, _, _, producer, owner, _, _, size, table, tables, latency, inverse, channel_ptr, channels, _, _) = a
    source_op = producer[tensor]
    if source_op >= 0:
        source, ready = devices[op_group[source_op]], finish[source_op]
    else:
        source, ready = devices[owner[tensor]], 0.0
    if source == device or source < 0:
        return ready, -1
    if arrival[tensor, device] >= 0.0:
        return arrival[tensor, device], -1
    if table[tensor] >= 0:
        seconds = tables[table[tensor], source, device]
    else:
        seconds = latency[source, device] + size[tensor] * inverse[source, device]
    if contention:
        pair = source * len(latency) + device
        for k in range(channel_ptr[pair], channel_ptr[pair + 1]):
            ready = max(ready, channel_free[channels[k]])
    return ready + seconds, source


def _build(problem: Problem) -> OpArrays:
    by_op = np.argsort(problem.consumers, kind="stable")
    input_ptr = np.searchsorted(problem.consumers[by_op], np.arange(problem.num_ops + 1)).astype(np.int64)
    table = np.full(problem.num_tensors, -1, dtype=np.int32)
    count = problem.num_devices
    tables = np.zeros((len(problem.tensor_transfer_s), count, count))
    for row, (tensor, matrix) in enumerate(problem.tensor_transfer_s.items()):
        table[tensor], tables[row] = row, matrix
    latency, inverse = finite_links(problem)
    held = [channels for row in problem.links.effective_channels for channels in row]
    number = {channel: i for i, channel in enumerate(sorted({c for channels in held for c in channels}))}
    return OpArrays(
        time_s=np.where(problem.group_allowed[problem.op_group], problem.time_s, np.inf),
        op_group=problem.op_group,
        input_ptr=input_ptr,
        inputs=problem.edge_tensor[by_op],
        producer=problem.tensor_producer,
        owner=problem.tensor_owner,
        consumer_ptr=problem.consumer_ptr,
        consumers=problem.consumers,
        size=problem.tensor_bytes.astype(np.float64),
        table=table,
        tables=tables,
        latency=latency,
        inverse=inverse,
        channel_ptr=np.concatenate([[0], np.cumsum([len(channels) for channels in held])]).astype(np.int64),
        channels=np.array([number[c] for channels in held for c in channels], dtype=np.int32),
        footprint=group_graph(problem).footprint_bytes,
        order=problem.topological_order,
    )
