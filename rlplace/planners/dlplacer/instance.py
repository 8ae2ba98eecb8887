"""A problem in whole numbers: what the placement program is built from.

Axes: K tasks, V values (`rlplace.simulator.tasks`), G groups, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.dlplacer.ticks import Ticks, choose_ticks
from rlplace.problem import Problem
from rlplace.problem.order import topological_order
from rlplace.simulator.tasks import TaskGraph, task_graph


@dataclass(frozen=True, eq=False)
class Instance:
    """Times of a problem in ticks.

    Attributes:
        problem: The problem.
        tasks: Its tasks and values.
        ticks: Seconds to ticks.
        horizon: Ticks of the longest step that is considered.
        duration: int64 [K, D], -1 where the task's group may not sit.
        transfer: int64 [V, D, D], ticks of a value from one device to another, -1 where there is no link; 0 on the diagonal.
        group: int32 [K], group of each task.
        producers, readers: Tasks of each value.
        holder: int32 [V], group that makes or owns each value.
        occupies: bool [K], False for ops of collectives, which hold no device.
    """

    problem: Problem
    tasks: TaskGraph
    ticks: Ticks
    horizon: int
    duration: NDArray[np.int64]
    transfer: NDArray[np.int64]
    group: NDArray[np.int32]
    producers: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    holder: NDArray[np.int32]
    occupies: NDArray[np.bool_]

    @property
    def num_tasks(self) -> int:
        return len(self.group)

    @property
    def num_values(self) -> int:
        return len(self.holder)

    @cached_property
    def shortest(self) -> NDArray[np.int64]:
        """int64 [K], ticks of each task on its fastest device."""
        return np.where(self.duration >= 0, self.duration, np.iinfo(np.int64).max).min(axis=1)

    @cached_property
    def order(self) -> list[int]:
        """The tasks, producers before readers."""
        source, target = self.edges
        return topological_order(source, target, self.num_tasks)[0]

    @cached_property
    def edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64 [E] and int64 [E], producer and reader of every pair of tasks that a value joins, each pair once."""
        rows = zip(self.producers, self.readers, strict=True)
        pairs = sorted({(maker, reader) for makers, readers in rows for maker in makers for reader in readers})
        return np.array([p[0] for p in pairs], dtype=np.int64), np.array([p[1] for p in pairs], dtype=np.int64)

    @cached_property
    def heads(self) -> list[int]:
        """Per task, ticks that must pass before it can start: the longest chain of its ancestors."""
        return self._longest(*self.edges, self.order)

    @cached_property
    def tails(self) -> list[int]:
        """Per task, ticks that must pass after its end: the longest chain of its descendants."""
        source, target = self.edges
        return self._longest(target, source, self.order[::-1])

    def _longest(self, source: NDArray[np.int64], target: NDArray[np.int64], order: list[int]) -> list[int]:
        before: list[list[int]] = [[] for _ in range(self.num_tasks)]
        for maker, reader in zip(source.tolist(), target.tolist(), strict=True):
            before[reader].append(maker)
        length, shortest = [0] * self.num_tasks, self.shortest.tolist()
        for task in order:
            length[task] = max((length[p] + shortest[p] for p in before[task]), default=0)
        return length


def make_instance(problem: Problem, horizon_s: float, microbatches: int = 1) -> Instance:
    """Turns a problem into whole numbers.

    Args:
        problem: The problem.
        horizon_s: Step time of some plan in seconds; the program looks for nothing slower.
        microbatches: Passes over the forward and backward ops.
    """
    tasks = task_graph(problem, microbatches)
    group = problem.op_group[tasks.op]
    time_s = np.where(problem.group_allowed[group], problem.time_s[tasks.op], np.nan)
    sent_s = transfer_seconds(problem)
    used = [time_s.ravel(), sent_s[:, ~np.eye(problem.num_devices, dtype=bool)].ravel()]
    ticks = choose_ticks(np.concatenate(used), horizon_s)
    producers = _rows(tasks.producer_ptr, tasks.producers)
    owner = problem.tensor_owner[tasks.tensor]
    maker = np.array([row[0] if row else -1 for row in producers], dtype=np.int64)
    occupies = np.ones(problem.num_ops, dtype=bool)
    occupies[[op for collective in problem.collectives for op in collective.ops]] = False
    longest = int(ticks.down(np.array([horizon_s]))[0]) + (not ticks.exact)
    return Instance(
        problem=problem,
        tasks=tasks,
        ticks=ticks,
        horizon=longest,
        duration=ticks.down(time_s),
        transfer=ticks.down(sent_s)[tasks.tensor],
        group=group,
        producers=producers,
        readers=_rows(tasks.consumer_ptr, tasks.consumers),
        holder=np.where(maker >= 0, group[np.maximum(maker, 0)], owner).astype(np.int32),
        occupies=occupies[tasks.op],
    )


def safe_horizon_s(problem: Problem, microbatches: int = 1) -> float:
    """Seconds in which any step of the problem can be done if it can be done at all: everything one after another."""
    slowest = np.nan_to_num(problem.time_s, nan=0.0).max(axis=1).sum()
    sent = transfer_seconds(problem)
    worst = np.where(np.isfinite(sent), sent, 0.0).max(axis=(1, 2), initial=0.0).sum() * (problem.num_devices - 1)
    return float(microbatches * (slowest + worst))


def transfer_seconds(problem: Problem) -> NDArray[np.float64]:
    """float64 [T, D, D], seconds of every tensor between every two devices; inf where there is no link, 0 on the diagonal."""
    links = problem.links
    with np.errstate(divide="ignore", invalid="ignore"):
        sent: NDArray[np.float64] = (
            links.latency_s + problem.tensor_bytes.astype(np.float64)[:, None, None] / links.bandwidth_bytes_per_s
        )
    for tensor, table in problem.tensor_transfer_s.items():
        sent[tensor] = table
    sent[:, links.bandwidth_bytes_per_s == 0.0] = np.inf
    diagonal = np.arange(problem.num_devices)
    sent[:, diagonal, diagonal] = 0.0
    return sent


def _rows(ptr: NDArray[np.int64], entries: NDArray[np.int32]) -> tuple[tuple[int, ...], ...]:
    flat = entries.tolist()
    return tuple(tuple(flat[low:high]) for low, high in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True))
