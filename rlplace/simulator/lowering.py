"""From a `Problem` to the flat arrays of the compiled simulator, once per problem."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.problem import Links, Problem
from rlplace.simulator.fast import Graph, Work, bottom_levels


@dataclass(frozen=True)
class Lowered:
    """A problem as the compiled simulator reads it.

    Attributes:
        graph: Its arrays, read-only, as a plain tuple in the order of `Graph`.
        priority: float64 [N], the default priority (bottom levels).
        rank_of_op, op_of_rank: int32 [N], the default priority as ranks.
        num_channels: Distinct channels.
        width: Most channels that one transfer holds, at least 1.
        idle: Work buffers that nobody uses at the moment.
    """

    graph: Graph
    priority: NDArray[np.float64]
    rank_of_op: NDArray[np.int32]
    op_of_rank: NDArray[np.int32]
    num_channels: int
    width: int
    idle: list[Work] = field(default_factory=list)

    def new_work(self) -> Work:
        """Allocates the buffers of one simulation."""
        (ops, devices), tensors, edges = self.graph.time_s.shape, len(self.graph.tensor_bytes), len(self.graph.consumers)
        sizes = {
            "device_of_op": ops, "missing": ops, "source": tensors, "source_uses": tensors, "copies": tensors,
            "copy_device": edges, "copy_uses": edges, "blocked": edges, "joined": edges, "following": edges * self.width,
            "head": self.num_channels, "tail": self.num_channels, "startable": edges + self.width, "ready": ops,
            "ready_ptr": devices + 1, "ready_size": devices, "due": devices, "position": devices, "heap_key": devices + edges,
            "transfer_slot": edges,
        }  # fmt: skip
        buffers = {name: np.zeros(size, dtype=np.int32) for name, size in sizes.items()}
        sizes_f = {
            "duration_s": ops, "heap_s": devices + edges, "busy_s": devices, "start_s": ops, "end_s": ops,
            "transfer_start_s": edges, "transfer_end_s": edges,
        }  # fmt: skip
        buffers |= {name: np.zeros(size, dtype=np.float64) for name, size in sizes_f.items()}
        buffers |= {name: np.zeros(devices, dtype=np.int64) for name in ("memory", "peak")}
        return Work(**buffers, state=np.zeros(devices, dtype=np.int8))

    def take_work(self) -> Work:
        """Buffers for one simulation; hand them back with `give_work`."""
        try:
            return self.idle.pop()
        except IndexError:
            return self.new_work()

    def give_work(self, work: Work) -> None:
        """Keeps the buffers for the next simulation."""
        if len(self.idle) < 2:
            self.idle.append(work)


_FLOATS = ("time_s", "table_s", "bandwidth", "latency")

_CACHE: weakref.WeakKeyDictionary[Problem, Lowered] = weakref.WeakKeyDictionary()


def lower(problem: Problem) -> Lowered:
    """The problem's arrays; built on the first call and kept as long as the problem."""
    lowered = _CACHE.get(problem)
    if lowered is None:
        lowered = _CACHE[problem] = _lower(problem)
    return lowered


def ranks(priority: NDArray[np.float64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(rank_of_op, op_of_rank), int32 [N]: highest priority first, ties to the smaller op number."""
    op_of_rank = np.argsort(-priority, kind="stable").astype(np.int32)
    rank_of_op = np.empty_like(op_of_rank)
    rank_of_op[op_of_rank] = np.arange(len(op_of_rank), dtype=np.int32)
    return rank_of_op, op_of_rank


def _lower(problem: Problem) -> Lowered:
    ops, devices, tensors = problem.num_ops, problem.num_devices, problem.num_tensors
    channel_ptr, channels, num_channels, width = _channels(problem.links, devices)
    if ops + devices + len(problem.consumers) * width >= 1 << 31:
        raise InputError(f"problem: {ops} ops with {len(problem.consumers)} consumers are too many for the simulator")
    made = np.flatnonzero(problem.tensor_producer >= 0)
    producer = problem.tensor_producer[made]
    used = np.diff(problem.consumer_ptr) > 0
    output_bytes, unused_bytes = np.zeros(ops, dtype=np.int64), np.zeros(ops, dtype=np.int64)
    np.add.at(output_bytes, producer, problem.tensor_bytes[made])
    np.add.at(unused_bytes, producer, np.where(used, 0, problem.tensor_bytes)[made])
    kept = np.flatnonzero(used)
    maker = np.where(problem.tensor_owner[kept] >= 0, ops, problem.tensor_producer[kept])  # groups' tensors in a last row
    table = np.full(tensors, -1, dtype=np.int32)
    overrides = sorted(problem.tensor_transfer_s)
    table[overrides] = np.arange(len(overrides))
    table_s = [problem.tensor_transfer_s[tensor] for tensor in overrides]
    graph = Graph(
        time_s=problem.time_s,
        op_group=problem.op_group,
        num_inputs=np.bincount(problem.consumers, minlength=ops).astype(np.int32),
        alloc_bytes=output_bytes + problem.temporary_bytes,
        free_bytes=unused_bytes + problem.temporary_bytes,
        input_ptr=_offsets(problem.consumers, ops),
        inputs=problem.edge_tensor[np.argsort(problem.consumers, kind="stable")],
        output_ptr=_offsets(maker, ops + 1),
        outputs=kept[np.argsort(maker, kind="stable")],
        tensor_producer=problem.tensor_producer,
        tensor_owner=problem.tensor_owner,
        tensor_bytes=problem.tensor_bytes,
        tensor_table=table,
        table_s=np.array(table_s, dtype=np.float64).reshape(len(table_s), devices, devices),
        consumer_ptr=problem.consumer_ptr.astype(np.int32),
        consumers=problem.consumers,
        edge_tensor=problem.edge_tensor,
        bandwidth=problem.links.bandwidth_bytes_per_s,
        latency=problem.links.latency_s,
        channel_ptr=channel_ptr,
        channels=channels,
        width=np.array([width]),
        resident_bytes=problem.resident_bytes,
        reserved_bytes=np.array([d.reserved_bytes for d in problem.devices], dtype=np.int64),
        limit_bytes=np.array([-1 if d.memory_bytes is None else d.memory_bytes for d in problem.devices], dtype=np.int64),
    )
    graph = Graph(*(_frozen(name, array) for name, array in graph._asdict().items()))
    priority = np.zeros(ops)
    bottom_levels(
        _frozen("", problem.topological_order),
        graph.time_s,
        graph.output_ptr,
        graph.outputs,
        graph.consumer_ptr,
        graph.consumers,
        priority,
    )
    priority.setflags(write=False)
    rank_of_op, op_of_rank = ranks(priority)
    return Lowered(graph, priority, rank_of_op, op_of_rank, num_channels, width)


def _frozen(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous read-only view or copy: one array type for the compiler, whatever the problem was built from."""
    dtype = np.float64 if name in _FLOATS else np.int64 if name.endswith("_bytes") else np.int32
    frozen = np.ascontiguousarray(array, dtype=dtype).view()
    frozen.setflags(write=False)
    return frozen


def _offsets(keys: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """int32 [count + 1], where each key's run starts once the keys are sorted."""
    return np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=count))]).astype(np.int32)


def _channels(links: Links, devices: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int, int]:
    """Channels of every ordered pair in rows of `channel_ptr`, renumbered 0..C-1; C and the longest row."""
    pairs = devices * devices
    if links.channels is None:
        return np.arange(pairs + 1, dtype=np.int32), np.arange(pairs, dtype=np.int32), pairs, 1
    held = [links.channels[i][j] if i != j else () for i in range(devices) for j in range(devices)]
    lengths = [len(row) for row in held]
    flat = np.array([channel for row in held for channel in row], dtype=np.int64)
    names, channels = np.unique(flat, return_inverse=True)
    ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return ptr, channels.astype(np.int32), len(names), max(1, *lengths) if lengths else 1
