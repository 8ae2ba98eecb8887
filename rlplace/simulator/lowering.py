"""From a `Problem` to the flat arrays of the compiled simulator, once per problem, number of micro-batches and schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE, Problem
from rlplace.problem.memoized import memoized
from rlplace.problem.order import grouped
from rlplace.schedule import BACKWARD_GATES, FORWARD_GATES, LIST, NO_GATES, SCHEDULES, Schedule, free_schedule
from rlplace.simulator import records as r
from rlplace.simulator.fast import bottom_levels
from rlplace.simulator.queues import levels
from rlplace.simulator.records import Graph, Work
from rlplace.simulator.tasks import TaskGraph, task_graph


@dataclass(frozen=True, eq=False)
class Lowered:
    """A step as the compiled simulator reads it.

    Attributes:
        tasks: The tasks.
        schedule: The schedule; `list` for those that give every plan an order of its own.
        graph: The arrays, read-only.
        value: Values as they are before a run, copied into every `Work`.
        priority: float64 [N], the default priority.
        ranks: uint32 [2, K], rank of every task and task of every rank, for the default priority.
        num_devices: D.
        num_channels: Distinct channels.
        idle: State of simulations that nobody uses at the moment, without and with timeline.
    """

    tasks: TaskGraph
    schedule: Schedule
    graph: Graph
    value: NDArray[Any]
    priority: NDArray[np.float64]
    ranks: NDArray[np.uint32]
    num_devices: int
    num_channels: int
    idle: tuple[list[Work], list[Work]] = field(default_factory=lambda: ([], []))

    def new_work(self, *, timeline: bool = False, stages: int | None = None) -> Work:
        """Allocates the state of one simulation.

        Args:
            timeline: Whether it records when things happen.
            stages: Most stages of a plan, default one a device.
        """
        tasks, devices, graph = self.tasks.num_tasks, self.num_devices, self.graph
        collectives, width = len(self.tasks.collective), int(graph.layout[r.WIDTH])
        slots = len(graph.readers) + collectives
        gated = self.schedule.gates != NO_GATES
        stages = (devices if stages is None else stages) if gated else 0
        batches = self.tasks.microbatches if self.schedule.gates == FORWARD_GATES else 1
        sizes = {
            r.WAITS: tasks, r.FOLLOWING: slots * width, r.STARTABLE: slots + width, r.DUE_DEVICES: 2 * devices,
            r.ABSENT: collectives, r.GATE_PTR: stages + gated, r.GATE_OPS: len(part_of(graph, r.GATED)), r.OPENED: stages,
            r.LEFT: stages * batches, r.SPARE: stages,
        }  # fmt: skip
        _, low = levels.py_func(tasks)
        parts = [sizes[part] for part in range(len(sizes))]
        return Work(
            value=self.value.copy(),
            slot=np.zeros(slots, dtype=r.SLOT),
            channel=np.zeros(self.num_channels, dtype=r.CHANNEL),
            device=np.zeros(devices, dtype=r.DEVICE),
            event=np.zeros(devices + slots, dtype=r.EVENT),
            ready=np.zeros((devices, low + ((tasks + 63) >> 6)), dtype=np.uint64),
            words=np.zeros(sum(parts), dtype=np.uint32),
            layout=np.concatenate([[0], np.cumsum(parts), [0]]),
            time_s=np.zeros((2, tasks if timeline else 0)),
            transfer=np.zeros(len(graph.readers) if timeline else 0, dtype=r.TRANSFER),
        )

    def take_work(self, *, timeline: bool = False) -> Work:
        """State for one simulation with a stage a device; hand it back with `give_work`."""
        try:
            return self.idle[timeline].pop()
        except IndexError:
            return self.new_work(timeline=timeline)

    def give_work(self, work: Work, *, timeline: bool = False) -> None:
        """Keeps the state for the next simulation."""
        if len(self.idle[timeline]) < 2:
            self.idle[timeline].append(work)


def lower(problem: Problem, microbatches: int = 1, schedule: str = LIST) -> Lowered:
    """The arrays of a step; built on the first call and kept as long as the problem."""
    free_schedule(schedule)
    return _lower(problem, microbatches, schedule)


@memoized
def compiled_priority(problem: Problem) -> NDArray[np.float64]:
    """`reference_priority`, compiled: float64 [N], read-only."""
    level = np.zeros(problem.num_ops)
    outputs = np.flatnonzero(problem.tensor_producer >= 0)
    output_ptr, outputs = grouped(problem.tensor_producer[outputs], outputs, problem.num_ops)
    bottom_levels(
        _frozen(problem.topological_order, np.int32),
        _frozen(problem.time_s, np.float64),
        *(_frozen(array, np.int32) for array in (output_ptr, outputs, problem.consumer_ptr, problem.consumers)),
        level,
    )
    level.setflags(write=False)
    return level


def ranks(
    problem: Problem, tasks: TaskGraph, schedule: Schedule, priority: NDArray[np.float64] | None = None
) -> NDArray[np.uint32]:
    """What `reference.task_ranks` defines: uint32 [2, K], rank of every task and task of every rank.

    Tasks are numbered by micro-batch and op, so equal keys keep their order.
    """
    value = -(compiled_priority(problem) if priority is None else priority)[tasks.op]
    keys: list[NDArray[Any]] = [value]  # the last key counts most
    if tasks.microbatches > 1 and (priority is None or not schedule.by_priority_alone):
        keys.append(tasks.microbatch)
    if schedule.backward_first:
        keys.append((problem.op_phase[tasks.op] == FORWARD).astype(np.int32))
    return with_inverse(np.argsort(value, kind="stable") if len(keys) == 1 else np.lexsort(keys))


def with_inverse(task_of_rank: NDArray[Any]) -> NDArray[np.uint32]:
    """The two rows of `ranks`."""
    both = np.empty((2, len(task_of_rank)), dtype=np.uint32)
    both[1] = task_of_rank
    both[0, task_of_rank] = np.arange(len(task_of_rank), dtype=np.uint32)
    return both


@memoized
def _lower(problem: Problem, microbatches: int, schedule_name: str) -> Lowered:
    tasks, schedule = task_graph(problem, microbatches), SCHEDULES[schedule_name]
    count, values = tasks.num_tasks, tasks.num_values
    size, makers, reads = problem.tensor_bytes[tasks.tensor], np.diff(tasks.producer_ptr), np.diff(tasks.consumer_ptr)
    value_of_made, value_of_read = np.repeat(np.arange(values), makers), np.repeat(np.arange(values), reads)
    read = reads > 0
    temporary = problem.temporary_bytes[tasks.op]
    task = np.zeros(count + 2, dtype=r.TASK)
    single = makers[value_of_made] == 1
    maker, of_maker = tasks.producers[single], value_of_made[single]
    alloc, free = temporary.copy(), temporary.copy()
    np.add.at(alloc, maker, size[of_maker])
    np.add.at(free, maker, np.where(read, 0, size)[of_maker])
    task["alloc_bytes"][:count], task["free_bytes"][:count] = alloc, free
    task["op"][:count], task["group"][:count] = tasks.op, problem.op_group[tasks.op]
    heavy = size[value_of_read] > 0
    input_ptr, inputs = grouped(tasks.consumers[heavy], value_of_read[heavy], count)
    task["inputs"] = np.append(input_ptr, input_ptr[-1])
    owned = np.flatnonzero((makers == 0) & read)
    kept = read[value_of_made]
    task["outputs"], outputs = grouped(
        np.concatenate([tasks.producers[kept], np.full(len(owned), count)]),
        np.concatenate([value_of_made[kept], owned]),
        count + 1,
    )
    readers = np.zeros(len(tasks.consumers), dtype=r.READER)
    readers["task"], readers["group"] = tasks.consumers, problem.op_group[tasks.op[tasks.consumers]]
    columns: dict[bytes, int] = {}
    column = [columns.setdefault(problem.time_s[:, device].tobytes(), len(columns)) for device in range(problem.num_devices)]
    pair, channels, held, num_channels, width = _channels(problem, tasks)
    if (len(readers) + len(tasks.collective)) * width >= 1 << 31:
        raise InputError(f"problem: {count} tasks with {len(readers)} readers are too many for the simulator")
    words: dict[int, Any] = dict.fromkeys(range(r.PASS_PTR + 1), ())
    words |= {
        r.COLUMN: column,
        r.INPUTS: inputs,
        r.OUTPUTS: outputs,
        r.OWNER: problem.tensor_owner[tasks.tensor[owned]],
        r.CHANNELS: channels,
    }
    missing = np.bincount(tasks.consumers, minlength=count)
    if (makers > 1).any():
        words[r.GATHERED] = np.flatnonzero(makers > 1)
        words[r.GATHERED_PTR], words[r.GATHERED_OF] = grouped(tasks.producers[~single], value_of_made[~single], count)
    if len(tasks.collective):
        collective_of = np.full(count, r.NONE, dtype=np.uint32)
        row = np.repeat(np.arange(len(tasks.collective)), np.diff(tasks.collective_ptr))
        collective_of[tasks.collective_tasks] = row
        members = tasks.collective_tasks[np.lexsort((tasks.collective_tasks, row))]
        words |= {r.COLLECTIVE_OF: collective_of, r.MEMBER_PTR: tasks.collective_ptr, r.MEMBERS: members, r.HELD: held}
    if not schedule.by_priority_alone:
        words |= _gate_words(problem, tasks, schedule)
        waits = np.zeros(problem.num_ops, dtype=np.int64)
        waits[words[r.GATED]] = 1
        missing += waits[tasks.op]
    words |= {r.MISSING: missing, r.FIRST: np.flatnonzero(missing == 0)}
    lists = [np.asarray(words[i], dtype=np.uint32) for i in range(len(words))]
    overrides = sorted(problem.tensor_transfer_s)
    table_s = np.array([problem.tensor_transfer_s[tensor] for tensor in overrides], dtype=np.float64)
    limits = [-1 if device.memory_bytes is None else device.memory_bytes for device in problem.devices]
    numbers = [tasks.microbatches, schedule.gates, (problem.op_phase != UPDATE).sum(), width]
    graph = Graph(
        time_s=problem.time_s[:, [column.index(i) for i in range(len(columns))]],
        task=task,
        readers=readers,
        pair=pair,
        table_s=table_s.reshape(len(overrides), problem.num_devices, problem.num_devices),
        bytes=np.concatenate([problem.resident_bytes, [device.reserved_bytes for device in problem.devices], limits]),
        words=np.concatenate(lists),
        layout=np.concatenate([[0], np.cumsum([len(part) for part in lists]), numbers]),
    )
    dtypes = Graph(np.float64, r.TASK, r.READER, r.PAIR, np.float64, np.int64, np.uint32, np.int64)
    frozen = Graph(*(_frozen(array, dtype) for array, dtype in zip(graph, dtypes, strict=True)))
    value = np.zeros(values + 1, dtype=r.VALUE)
    table = np.full(problem.num_tensors, -1, dtype=np.int32)
    table[overrides] = np.arange(len(overrides))
    value["bytes"][:values], value["table"][:values], value["readers"] = size, table[tasks.tensor], tasks.consumer_ptr
    known = compiled_priority(problem), ranks(problem, tasks, schedule)
    return Lowered(tasks, schedule, frozen, value, *known, problem.num_devices, num_channels)


def _gate_words(problem: Problem, tasks: TaskGraph, schedule: Schedule) -> dict[int, Any]:
    """The parts of `Graph.words` about gates; `rlplace.simulator.stages` says what they stand for."""
    phase, group = problem.op_phase, problem.op_group
    forward, backward = phase == FORWARD, (phase == BACKWARD) | (phase == BACKWARD_WEIGHT)
    closes = np.full(problem.num_ops, r.NO_STAGE)
    maker, reader = problem.op_edges
    apart_ptr, apart = np.zeros(problem.num_ops + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if schedule.gates == BACKWARD_GATES:
        closes[forward] = r.OWN_STAGE
    else:
        has_forward, has_backward = np.zeros((2, problem.num_groups), dtype=bool)
        has_forward[group[forward]], has_backward[group[backward]] = True, True
        closes[backward & has_forward[group]] = r.OWN_STAGE
        closes[forward] = r.SPARE_STAGE
        split = forward[maker] & ~has_backward[group[maker]] & backward[reader] & ~has_forward[group[reader]]
        closes[reader[split]] = r.APART_STAGES
        apart_ptr, apart = grouped(reader[split], group[maker[split]], problem.num_ops)
    both = forward[maker] & forward[reader] & (group[maker] != group[reader])
    early = phase != UPDATE
    waiting = {NO_GATES: False & early, BACKWARD_GATES: backward, FORWARD_GATES: forward}[schedule.gates]
    return {
        r.MICROBATCH: tasks.microbatch,
        r.OP_GROUP: group,
        r.EARLY_TASK: np.where(early, np.cumsum(early) - 1, 0),
        r.GATED: np.flatnonzero(waiting),
        r.CLOSES: closes,
        r.APART_PTR: apart_ptr,
        r.APART: apart,
        r.PASS_PTR: _pass_ptr(problem, tasks) if schedule.backward_first else (),
        r.LINKS: np.unique(np.stack([group[maker[both]], group[reader[both]]], axis=1), axis=0).ravel(),
    }


def _pass_ptr(problem: Problem, tasks: TaskGraph) -> NDArray[np.int64]:
    """Where the ranks of each pass begin: first backward and update by micro-batch, then forward."""
    number = tasks.microbatch + tasks.microbatches * (problem.op_phase[tasks.op] == FORWARD)
    return np.concatenate([[0], np.cumsum(np.bincount(number, minlength=2 * tasks.microbatches))])


def _channels(problem: Problem, tasks: TaskGraph) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], int, int]:
    """What pairs of devices and collectives hold.

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
    rows += [problem.collectives[index].channels for index in tasks.collective.tolist()]
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    starts = np.concatenate([[0], ends])
    pair["channels"], pair["channels_end"] = starts[: devices * devices], ends[: devices * devices]
    names, channels = np.unique(np.array([channel for row in rows for channel in row], dtype=np.int64), return_inverse=True)
    return pair, channels, starts[devices * devices :], len(names), max([1, *(len(row) for row in rows)])


def _frozen(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """A contiguous read-only view or copy: one array type for the compiler, whatever the problem was built from."""
    frozen = np.ascontiguousarray(array, dtype=dtype).view()
    frozen.setflags(write=False)
    return frozen


def part_of(graph: Graph, number: int) -> NDArray[np.uint32]:
    """One of the lists in `Graph.words`."""
    return graph.words[graph.layout[number] : graph.layout[number + 1]]
