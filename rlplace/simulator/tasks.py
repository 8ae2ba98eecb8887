"""The tasks of a step with several micro-batches (rule 6 of the executor), as arrays that both simulators read.

A *task* is one execution of an op, a *value* one execution's result: what a tensor is for one micro-batch. Forward and backward
ops have a task for every micro-batch, update ops one. A tensor has a value for every micro-batch, except that

* an owner's tensor and what an update op makes have one value for the whole step;
* what forward or backward ops make for update ops accumulates in one value: it takes memory when the first of its producers
  starts, is there when the last one ends, and is sent once. If ops of the micro-batch itself read the tensor too, they read
  values of their own.

Numbers run through the micro-batches, within each through the ops (tensors); what exists once belongs to the last micro-batch.
With one micro-batch, tasks are ops and values are tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, whole_number
from rlplace.problem import UPDATE, Problem
from rlplace.problem.memoized import memoized
from rlplace.problem.order import grouped

MAX_TASKS = 1 << 26
"""Tasks and reads of values that one step may have."""


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks and values of one step. Axes: K tasks, V values.

    Attributes:
        microbatches: M.
        op: int32 [K].
        microbatch: int32 [K], M - 1 for update ops.
        tensor: int32 [V].
        value_microbatch: int32 [V], -1 for what exists once.
        producer_ptr, producers: Offsets int64 [V + 1] and tasks int32; no producer for an owner's tensor.
        consumer_ptr, consumers: The same for the tasks that read a value.
        collective_ptr, collective_tasks: The same for every collective and micro-batch.
        collective: int32, index into `Problem.collectives` of each row of `collective_ptr`.
    """

    microbatches: int
    op: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    tensor: NDArray[np.int32]
    value_microbatch: NDArray[np.int32]
    producer_ptr: NDArray[np.int64]
    producers: NDArray[np.int32]
    consumer_ptr: NDArray[np.int64]
    consumers: NDArray[np.int32]
    collective_ptr: NDArray[np.int64]
    collective_tasks: NDArray[np.int32]
    collective: NDArray[np.int32]

    @property
    def num_tasks(self) -> int:
        return len(self.op)

    @property
    def num_values(self) -> int:
        return len(self.tensor)


def order_tasks(tasks: TaskGraph, order: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Per device the tasks of an order, which holds ops, or (op, micro-batch) pairs when there are several micro-batches.

    What runs once belongs to the last micro-batch and is listed with 0.
    """
    if tasks.microbatches == 1:
        return [[int(op) for op in row] for row in order]
    number = {key: task for task, key in enumerate(zip(tasks.op.tolist(), tasks.microbatch.tolist(), strict=True))}
    once = tasks.microbatches - 1
    pairs = [[tuple(pair) for pair in row] for row in order]
    return [[number[op, m] if (op, m) in number else number[op, once] for op, m in row] for row in pairs]


def task_graph(problem: Problem, microbatches: int = 1) -> TaskGraph:
    """The tasks of a step; built on the first call and kept as long as the problem.

    Raises:
        InputError: `microbatches` is not a positive whole number, or the step would have too many tasks.
    """
    whole_number(microbatches, "microbatches", 1)
    if microbatches * (problem.num_ops + len(problem.consumers)) > MAX_TASKS:
        raise InputError(f"{microbatches} microbatches of {problem.num_ops} ops are more than a step may have ({MAX_TASKS})")
    return _build(problem, int(microbatches))


@memoized
def _build(problem: Problem, count: int) -> TaskGraph:
    ops, once_op = problem.num_ops, problem.op_phase == UPDATE
    if count == 1:
        once_op = np.ones(ops, dtype=bool)
    task_of, op, microbatch = _number(~once_op, once_op, count)

    tensor_of_edge, reader = problem.edge_tensor, problem.consumers
    made, owned = problem.tensor_producer, problem.tensor_owner >= 0
    passing = ~owned & ~once_op[np.maximum(made, 0)]  # made anew for every micro-batch
    read_once, read_often = np.zeros((2, problem.num_tensors), dtype=bool)
    read_once[tensor_of_edge[once_op[reader]]] = True
    read_often[tensor_of_edge[~once_op[reader]]] = True
    often = passing & (read_often | ~read_once)
    once = ~passing | read_once
    value_of, tensor, value_microbatch = _number(often, once, count)
    value_microbatch = np.where(value_microbatch == count, -1, value_microbatch).astype(np.int32)

    # Who reads: a value of a micro-batch its own tasks; an accumulated value the update tasks; any other all of them.
    edges: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for m in range(count):
        own = often[tensor_of_edge] & ~once_op[reader]
        edges.append((value_of[m, tensor_of_edge[own]], task_of[m, reader[own]]))
        shared = ~passing[tensor_of_edge] & ~once_op[reader]
        edges.append((value_of[count, tensor_of_edge[shared]], task_of[m, reader[shared]]))
    late = once_op[reader]
    edges.append((value_of[count, tensor_of_edge[late]], task_of[count, reader[late]]))
    consumer_ptr, consumers = _rows(edges, len(tensor))

    sources: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for m in range(count):
        own = np.flatnonzero(often)
        sources.append((value_of[m, own], task_of[m, made[own]]))
        gathered = np.flatnonzero(passing & once)
        sources.append((value_of[count, gathered], task_of[m, made[gathered]]))
    single = np.flatnonzero(~passing & ~owned)
    sources.append((value_of[count, single], task_of[count, made[single]]))
    producer_ptr, producers = _rows(sources, len(tensor))

    members: list[list[int]] = []
    which: list[int] = []
    for index, collective in enumerate(problem.collectives):
        rows = [count] if once_op[collective.ops[0]] else range(count)
        members += [[int(task_of[m, member]) for member in collective.ops] for m in rows]
        which += [index] * len(rows)
    return TaskGraph(
        microbatches=count,
        op=op,
        microbatch=np.minimum(microbatch, count - 1).astype(np.int32),
        tensor=tensor,
        value_microbatch=value_microbatch,
        producer_ptr=producer_ptr,
        producers=producers,
        consumer_ptr=consumer_ptr,
        consumers=consumers,
        collective_ptr=np.concatenate([[0], np.cumsum([len(row) for row in members], dtype=np.int64)]).astype(np.int64),
        collective_tasks=np.array([task for row in members for task in row], dtype=np.int32),
        collective=np.array(which, dtype=np.int32),
    )


def _number(
    often: NDArray[np.bool_], once: NDArray[np.bool_], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Numbers what exists per micro-batch and what exists once.

    In the last micro-batch an item's own part comes right before the part that exists once, items in order.

    Args:
        often: bool [X], items with a part for every micro-batch.
        once: bool [X], items with a part that exists once.
        count: Micro-batches.

    Returns:
        int64 [count + 1, X], number by micro-batch (row `count`: what exists once) and item, -1 where there is none; and for
        every number its item and its row.
    """
    items = np.arange(len(often))
    rows, who = [], []
    for m in range(count - 1):
        who.append(items[often])
        rows.append(np.full(int(often.sum()), m))
    last_item = np.concatenate([items[often], items[once]])
    last_row = np.concatenate([np.full(int(often.sum()), count - 1), np.full(int(once.sum()), count)])
    order = np.lexsort((last_row, last_item))
    who.append(last_item[order])
    rows.append(last_row[order])
    item, row = np.concatenate(who), np.concatenate(rows)
    number = np.full((count + 1, len(often)), -1, dtype=np.int64)
    number[row, item] = np.arange(len(item))
    return number, item.astype(np.int32), row.astype(np.int32)


def _rows(pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]], count: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Offsets and entries of the second numbers, grouped by the first and in the order given."""
    key = np.concatenate([first for first, _ in pairs])
    entry = np.concatenate([second for _, second in pairs])
    ptr, entries = grouped(key, entry, count)
    return ptr, entries.astype(np.int32)
