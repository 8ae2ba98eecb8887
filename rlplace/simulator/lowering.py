"""From a `Problem` to the flat arrays of the compiled simulator, once per problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.arrays import buffers, constants, frozen_array
from rlplace.errors import InputError
from rlplace.memoized import memoized
from rlplace.problem import Problem
from rlplace.problem.order import grouped, longest_ways
from rlplace.simulator import records as r
from rlplace.simulator.queues import levels
from rlplace.simulator.records import Graph, Work


@dataclass(frozen=True, eq=False)
class Lowered:
    """A step as the compiled simulator reads it.

    Attributes:
        graph: The arrays, read-only.
        value: State of the values before a run, copied into every `Work`.
        priority: float64 [N], the default priority.
        ranks: uint32 [2, N], rank of every op and op of every rank, for the default priority.
        num_devices: D.
        num_channels: Distinct channels.
        idle: State of simulations for reuse, without and with timeline.
    """

    graph: Graph
    value: NDArray[Any]
    priority: NDArray[np.float64]
    ranks: NDArray[np.uint32]
    num_devices: int
    num_channels: int
    idle: tuple[list[Work], list[Work]] = field(default_factory=lambda: ([], []))

    def new_work(self, *, timeline: bool = False) -> Work:
        """Allocates the state of one simulation; with `timeline` it has room for start and end times."""
        tasks, devices, graph = len(self.priority), self.num_devices, self.graph
        collectives, width = max(0, len(part_of(graph, r.MEMBER_PTR)) - 1), int(graph.layout[r.WIDTH])
        slots = len(graph.readers) + collectives
        parts = {
            r.WAITS: tasks, r.FOLLOWING: slots * width, r.STARTABLE: slots + width, r.DUE_DEVICES: 2 * devices,
            r.ABSENT: collectives,
        }  # fmt: skip
        sizes = [parts[part] for part in range(len(parts))]
        _, low = levels.py_func(tasks)
        work: Work = buffers(
            Work, V=len(self.value), S=slots, C=self.num_channels, D=devices, H=devices + slots, R=low + ((tasks + 63) >> 6),
            W=sum(sizes), P=len(sizes) + 2, K=tasks if timeline else 0, E=len(graph.readers) if timeline else 0,
        )  # fmt: skip
        work.value[:], work.layout[1:-1] = self.value, np.cumsum(sizes)
        return work

    def take_work(self, *, timeline: bool = False) -> Work:
        """Returns state for one simulation; hand it back with `give_work`."""
        try:
            return self.idle[timeline].pop()
        except IndexError:
            return self.new_work(timeline=timeline)

    def give_work(self, work: Work, *, timeline: bool = False) -> None:
        """Keeps the state for the next simulation."""
        if len(self.idle[timeline]) < 2:
            self.idle[timeline].append(work)


@memoized
def compiled_priority(problem: Problem) -> NDArray[np.float64]:
    """Computes `reference_priority`, quicker: float64 [N], read-only."""
    mean_s = sum(np.nan_to_num(problem.time_s, nan=0.0).T) / problem.op_allowed.sum(axis=1)  # from left to right
    return frozen_array(mean_s + longest_ways(problem, mean_s.tolist(), backwards=True), np.float64)


def compiled_ranks(problem: Problem, priority: NDArray[np.float64] | None = None) -> NDArray[np.uint32]:
    """Returns `reference.ranks` for compiled code: uint32 [2, N], rank of every op and op of every rank."""
    return with_inverse(np.argsort(-(compiled_priority(problem) if priority is None else priority), kind="stable"))


def with_inverse(task_of_rank: NDArray[Any]) -> NDArray[np.uint32]:
    """Returns the two rows of `compiled_ranks`, from the second one."""
    both = np.empty((2, len(task_of_rank)), dtype=np.uint32)
    both[1] = task_of_rank
    both[0, task_of_rank] = np.arange(len(task_of_rank), dtype=np.uint32)
    return both


@memoized
def lower(problem: Problem) -> Lowered:
    """Returns the arrays of a step; built on the first call and kept as long as the problem."""
    count, size, produced = problem.num_ops, problem.tensor_bytes, problem.tensor_producer >= 0
    tensor, reader, read = problem.edge_tensor, problem.consumers, np.diff(problem.consumer_ptr) > 0
    task = np.zeros(count + 2, dtype=r.TASK)
    alloc, free = problem.temporary_bytes.copy(), problem.temporary_bytes.copy()
    np.add.at(alloc, problem.tensor_producer[produced], size[produced])
    np.add.at(free, problem.tensor_producer[produced], np.where(read, 0, size)[produced])
    task["alloc_bytes"][:count], task["free_bytes"][:count] = alloc, free
    task["group"][:count] = problem.op_group
    heavy = size[tensor] > 0
    input_ptr, inputs = grouped(reader[heavy], tensor[heavy], count)
    task["inputs"] = np.append(input_ptr, input_ptr[-1])
    owned, kept = np.flatnonzero(~produced & read), np.flatnonzero(produced & read)
    task["outputs"], outputs = grouped(
        np.concatenate([problem.tensor_producer[kept], np.full(len(owned), count)]), np.concatenate([kept, owned]), count + 1
    )
    readers = np.zeros(len(reader), dtype=r.READER)
    readers["task"], readers["group"] = reader, problem.op_group[reader]
    columns: dict[bytes, int] = {}
    column = [columns.setdefault(problem.time_s[:, device].tobytes(), len(columns)) for device in range(problem.num_devices)]
    pair, channels, held, num_channels, width = _channels(problem)
    if (len(readers) + len(problem.collectives)) * width >= 1 << 31:
        raise InputError(f"problem: {count} ops with {len(readers)} readers are too many for the simulator")
    missing = np.bincount(reader, minlength=count)
    words: dict[int, Any] = dict.fromkeys(range(r.HELD + 1), ())
    words |= {
        r.COLUMN: column,
        r.MISSING: missing,
        r.FIRST: np.flatnonzero(missing == 0),
        r.INPUTS: inputs,
        r.OUTPUTS: outputs,
        r.OWNER: problem.tensor_owner[owned],
        r.CHANNELS: channels,
    }
    if problem.collectives:
        collective_of = np.full(count, r.NONE, dtype=np.uint32)
        members = [sorted(collective.ops) for collective in problem.collectives]
        for number, ops in enumerate(members):
            collective_of[ops] = number
        ends = np.cumsum([0, *map(len, members)])
        words |= {r.COLLECTIVE_OF: collective_of, r.MEMBER_PTR: ends, r.MEMBERS: np.concatenate(members), r.HELD: held}
    lists = [np.asarray(words[i], dtype=np.uint32) for i in range(len(words))]
    overrides = sorted(problem.tensor_transfer_s)
    table_s = np.array([problem.tensor_transfer_s[tensor] for tensor in overrides], dtype=np.float64)
    limits = [-1 if device.memory_bytes is None else device.memory_bytes for device in problem.devices]
    graph = constants(
        Graph,
        time_s=problem.time_s[:, [column.index(i) for i in range(len(columns))]],
        task=task,
        readers=readers,
        pair=pair,
        table_s=table_s.reshape(len(overrides), problem.num_devices, problem.num_devices),
        bytes=np.concatenate([problem.resident_bytes, [device.reserved_bytes for device in problem.devices], limits]),
        words=np.concatenate(lists),
        layout=np.concatenate([[0], np.cumsum([len(part) for part in lists]), [width]]),
    )
    value = np.zeros(problem.num_tensors + 1, dtype=r.VALUE)
    table = np.full(problem.num_tensors, -1, dtype=np.int32)
    table[overrides] = np.arange(len(overrides))
    value["bytes"][:-1], value["table"][:-1], value["readers"] = size, table, problem.consumer_ptr
    return Lowered(graph, value, compiled_priority(problem), compiled_ranks(problem), problem.num_devices, num_channels)


def _channels(problem: Problem) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], int, int]:
    """Returns the channels of pairs of devices and of collectives.

    Returns:
        `Graph.pair`; the lists CHANNELS (numbered 0, 1, ...) and HELD; the number of channels; the longest row, at least 1.
    """
    links, devices = problem.links, problem.num_devices
    pair = np.zeros(devices * devices, dtype=r.PAIR)
    pair["latency_s"], pair["bandwidth"] = links.latency_s.ravel(), links.bandwidth_bytes_per_s.ravel()
    if links.channels is None and not problem.collectives:
        own = np.arange(devices * devices)
        pair["channels"], pair["channels_end"] = own, own + 1
        return pair, own, np.zeros(1, dtype=np.int64), len(own), 1
    held = links.effective_channels
    rows = [held[i][j] if i != j else () for i in range(devices) for j in range(devices)]
    rows += [collective.channels for collective in problem.collectives]
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    starts = np.concatenate([[0], ends])
    pair["channels"], pair["channels_end"] = starts[: devices * devices], ends[: devices * devices]
    names, channels = np.unique(np.array([channel for row in rows for channel in row], dtype=np.int64), return_inverse=True)
    return pair, channels, starts[devices * devices :], len(names), max([1, *(len(row) for row in rows)])


def part_of(graph: Graph, number: int) -> NDArray[np.uint32]:
    """Returns one of the lists in `Graph.words`."""
    return graph.words[graph.layout[number] : graph.layout[number + 1]]
