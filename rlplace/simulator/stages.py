"""Stages and admission: how schedules hold tasks back (rule 6 of the executor).

A gate holds tasks until enough other tasks have ended. Gates are numbered stage by stage:

* `BACKWARD_GATES`: a stage has one gate; its backward tasks wait there until all its forward tasks, of all micro-batches, have
  ended.
* `FORWARD_GATES`: a stage has a gate for each micro-batch, where its forward tasks wait. The first L gates are open, each
  micro-batch that the stage is done with opens the next, so at most L are in flight. L is the longest path, in stages, from
  the stage to a sink of the forward stage graph, both ends counted, cyclic parts condensed to one stage. A stage is done with
  a micro-batch when the backward of its own forward ops has ended: the backward tasks of groups that have forward ops there,
  and where such a group has none of its own (split problems), the backward tasks elsewhere that read what its forward ops
  made and whose group has no forward ops. A stage without any backward is done when its forward tasks have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, Problem
from rlplace.schedule import BACKWARD_GATES, FORWARD_GATES, SCHEDULES
from rlplace.simulator.tasks import TaskGraph


@dataclass(frozen=True, eq=False)
class Gates:
    """What holds tasks back. Axes: K tasks, S stages, W gates a stage.

    Attributes:
        stages: S.
        width: W.
        gate: int32 [K], where a task waits, stage * W + position; -1: nowhere.
        open_first: int [S], gates of each stage that are open from the start.
        counts_for: For every task the batches of tasks whose end it is part of, as (stage, batch).
        left: Tasks that each batch still waits for; when none is left, the stage opens its next gate.
    """

    stages: int
    width: int
    gate: NDArray[np.int32]
    open_first: list[int]
    counts_for: list[list[tuple[int, int]]]
    left: dict[tuple[int, int], int]


def stage_numbers(devices: NDArray[np.int32], stage_of_group: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """int32 [G], stages renumbered 0, 1, ... in order of their names; a group's stage is by default its device."""
    named = devices if stage_of_group is None else stage_of_group
    return np.unique(named, return_inverse=True)[1].astype(np.int32)


def forward_stage_links(problem: Problem, stage: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Bool [S, S], whether a forward op of one stage reads what a forward op of another makes."""
    count = int(stage.max(initial=-1)) + 1
    links = np.zeros((count, count), dtype=bool)
    source, reader = problem.op_edges
    both = (problem.op_phase[source] == FORWARD) & (problem.op_phase[reader] == FORWARD)
    links[stage[problem.op_group[source[both]]], stage[problem.op_group[reader[both]]]] = True
    np.fill_diagonal(links, False)
    return links


def stages_to_sink(links: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Int [S], stages on the longest path from each stage to a sink, itself included; stages on a common cycle count as one."""
    count = len(links)
    reach = links | np.eye(count, dtype=bool)
    for middle in range(count):
        reach |= reach[:, middle : middle + 1] & reach[middle : middle + 1, :]
    cyclic = reach & reach.T
    longest = np.zeros(count, dtype=np.int64)
    for stage in np.argsort(reach.sum(axis=1), kind="stable").tolist():  # what a stage reaches comes before it
        beyond = reach[stage] & ~cyclic[stage]
        longest[stage] = 1 + int(longest[beyond].max(initial=0))
    return longest


def closing_ops(problem: Problem, stage: NDArray[np.int32]) -> list[set[int]]:
    """For every stage the ops whose end finishes a micro-batch there; see the module docstring."""
    phase, group = problem.op_phase, problem.op_group
    forward, backward = phase == FORWARD, (phase == BACKWARD) | (phase == BACKWARD_WEIGHT)
    has_forward, has_backward = np.zeros((2, problem.num_groups), dtype=bool)
    has_forward[group[forward]], has_backward[group[backward]] = True, True
    closing: list[set[int]] = [set() for _ in range(int(stage.max(initial=-1)) + 1)]
    for op in np.flatnonzero(backward & has_forward[group]).tolist():
        closing[stage[group[op]]].add(op)
    for tensor, reader in zip(problem.edge_tensor.tolist(), problem.consumers.tolist(), strict=True):
        maker = int(problem.tensor_producer[tensor])
        apart = maker >= 0 and forward[maker] and not has_backward[group[maker]]
        if apart and backward[reader] and not has_forward[group[reader]]:
            closing[stage[group[maker]]].add(reader)
    for index, ops in enumerate(closing):
        if not ops:
            ops.update(np.flatnonzero(forward & (stage[group] == index)).tolist())
    return closing


def gates(
    problem: Problem, tasks: TaskGraph, schedule: str, devices: NDArray[np.int32], stage_of_group: NDArray[np.int32] | None
) -> Gates:
    """The gates of a schedule; the other schedules have none."""
    kind = SCHEDULES[schedule].gates
    stage = stage_numbers(devices, stage_of_group)
    count = int(stage.max(initial=-1)) + 1
    gate = np.full(tasks.num_tasks, -1, dtype=np.int32)
    counts_for: list[list[tuple[int, int]]] = [[] for _ in range(tasks.num_tasks)]
    left: dict[tuple[int, int], int] = {}
    phase, task_stage = problem.op_phase[tasks.op], stage[problem.op_group[tasks.op]]
    backward = (phase == BACKWARD) | (phase == BACKWARD_WEIGHT)

    def count_end(task: int, at: int, batch: int) -> None:
        counts_for[task].append((at, batch))
        left[at, batch] = left.get((at, batch), 0) + 1

    if kind == BACKWARD_GATES:
        gate[backward] = task_stage[backward]
        for task in np.flatnonzero(phase == FORWARD).tolist():
            count_end(task, int(task_stage[task]), 0)
        return Gates(count, 1, gate, [int((s, 0) not in left) for s in range(count)], counts_for, left)
    if kind == FORWARD_GATES:
        forward = phase == FORWARD
        gate[forward] = task_stage[forward] * tasks.microbatches + tasks.microbatch[forward]
        for at, ops in enumerate(closing_ops(problem, stage)):
            for task in np.flatnonzero(np.isin(tasks.op, sorted(ops))).tolist():
                count_end(task, at, int(tasks.microbatch[task]))
        longest = stages_to_sink(forward_stage_links(problem, stage)).tolist()
        return Gates(count, tasks.microbatches, gate, longest, counts_for, left)
    return Gates(count, 1, gate, [1] * count, counts_for, left)
