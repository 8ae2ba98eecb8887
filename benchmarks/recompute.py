"""Activation recomputation (checkpointing): run parts of the forward twice instead of keeping what they make.

A *segment* is a set of groups. Of its activations only those that other groups need are kept from the forward, among them what
enters the next segment; when the gradient that enters the segment has arrived, its forward ops run again and their outputs
serve its backward (Chen et al. 2016). With L equal layers in segments of sqrt(L) memory grows with sqrt(L), for one more
forward. Only what the segment's backward needs runs again, as torch's checkpoint stops early too. Random ops run again with
the same numbers, as torch's do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, whole_number
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, Problem
from rlplace.problem.build import tensor_fields, tensor_rows

SUFFIX = ".recompute"


def recompute(problem: Problem, segments: Sequence[Iterable[int]]) -> Problem:
    """The problem with some activations recomputed instead of kept.

    Args:
        problem: At either level.
        segments: Disjoint sets of group numbers. Contiguous parts of the forward make sense; others are handled.

    Returns:
        A problem with the same groups, and the same ops under the same numbers. Behind them come the ops that run again,
        ``NAME.recompute``: of phase backward and of the same group, with the time and temporary bytes of NAME. They wait for
        the gradients that enter their segment; where such a gradient arrives in another group than they start in, through an
        op ``GROUP.recompute`` that takes no time. A segment whose backward reads nothing of its forward stays as it is.

    Raises:
        InputError: Segments overlap, are empty, or name no group; the problem has no backward; or a part of it that would run
            again is a collective or runs again already.
    """
    segment_of_group = _segment_of_group(problem, segments)
    work = _Work(problem, segment_of_group)
    work.clone_ops()
    work.move_tensors()
    work.hold_back(len(segments))
    recorded = [sorted(np.flatnonzero(segment_of_group == s).tolist()) for s in range(len(segments))]
    return work.finish(recorded)


def _segment_of_group(problem: Problem, segments: Sequence[Iterable[int]]) -> NDArray[np.int32]:
    result = np.full(problem.num_groups, -1, dtype=np.int32)
    for number, segment in enumerate(segments):
        groups = list(segment)
        if not groups:
            raise InputError(f"recompute: segments[{number}] is empty; list group numbers, or leave it out")
        for group in groups:
            whole_number(group, f"recompute: segments[{number}]: a group", 0, problem.num_groups - 1)
            if result[group] >= 0:
                raise InputError(
                    f"recompute: group {int(group)} ({problem.group_names[group][:80]}) is in segments "
                    f"{int(result[group])} and {number}; a group can be in one only"
                )
            result[group] = number
    if not ((problem.op_phase == BACKWARD) | (problem.op_phase == BACKWARD_WEIGHT)).any():
        raise InputError("recompute: the problem has no backward; there is nothing to run again for")
    for name in problem.op_names:
        if name.endswith(SUFFIX):
            raise InputError(f"recompute: op {name[:80]!r} runs again already; give all segments at once")
    return result


@dataclass
class _Row:
    """A tensor in the making."""

    producer: int
    owner: int
    size: int
    consumers: list[int]
    table: NDArray[np.float64] | None = None


class _Work:
    """The problem while ops and tensors are added to it. New ops are numbered from `problem.num_ops`."""

    def __init__(self, problem: Problem, segment_of_group: NDArray[np.int32]) -> None:
        self.problem = problem
        self.segment_of_group = segment_of_group.tolist()
        self.outputs: dict[int, list[_Row]] = {}
        self.segment = segment_of_group[problem.op_group].tolist()
        self.phase = problem.op_phase.tolist()
        self.rows = [
            _Row(producer, owner, size, list(consumers), problem.tensor_transfer_s.get(tensor))
            for tensor, (producer, owner, size, consumers) in enumerate(tensor_rows(problem))
        ]
        self.inputs: list[list[int]] = [[] for _ in range(problem.num_ops)]
        for number, row in enumerate(self.rows):
            for op in row.consumers:
                self.inputs[op].append(number)
        self.origin: list[int] = []  # per new op the op that it repeats, or stands in the group of
        self.starts: dict[int, None] = {}  # new ops without work of their own
        self.twin: dict[int, int] = {}  # op to its clone

    def own_backward(self, op: int, segment: int) -> bool:
        return self.segment[op] == segment and self.phase[op] in (BACKWARD, BACKWARD_WEIGHT)

    def clone_ops(self) -> None:
        """Clones the forward ops that the backward of their own segment needs, directly or through one another."""
        pending = [
            row.producer
            for row in self.rows
            if row.producer >= 0
            and self.phase[row.producer] == FORWARD
            and (segment := self.segment[row.producer]) >= 0
            and any(self.own_backward(op, segment) for op in row.consumers)
        ]
        needed = set(pending)
        while pending:
            op = pending.pop()
            for number in self.inputs[op]:
                maker = self.rows[number].producer
                inside = maker >= 0 and self.segment[maker] == self.segment[op] and self.phase[maker] == FORWARD
                if inside and maker not in needed:
                    needed.add(maker)
                    pending.append(maker)
        together = {op for item in self.problem.collectives for op in item.ops}
        for op in sorted(needed):
            name = self.problem.op_names[op]
            if op in together:
                raise InputError(f"recompute: op {name[:80]!r} is part of a collective; recompute before replicas are made")
            self.twin[op] = self.new_op(op)

    def new_op(self, like: int) -> int:
        self.origin.append(like)
        self.segment.append(self.segment[like])
        self.phase.append(BACKWARD)
        return self.problem.num_ops + len(self.origin) - 1

    def move_tensors(self) -> None:
        """Gives clones their inputs and outputs, and the segments' own backward what the clones make."""
        for row in list(self.rows):
            home = self.segment[row.producer] if row.producer in self.twin else -1
            kept: list[int] = []
            again: list[int] = []
            for op in row.consumers:
                own = home >= 0 and self.own_backward(op, home)
                (again if own else kept).append(op)
                if op in self.twin:
                    inside = home >= 0 and self.segment[op] == home
                    (again if inside else kept).append(self.twin[op])
            row.consumers = kept
            if home >= 0 and (row.size or again):
                self.rows.append(_Row(self.twin[row.producer], -1, row.size, again, row.table))
        # An ordering edge that nobody waits on any more is gone; bytes are still made, and free at once.
        self.rows = [row for row in self.rows if row.consumers or row.size]

    def hold_back(self, num_segments: int) -> None:
        """Makes clones wait for the gradients that enter their segment, except those that only come after it began."""
        entering: list[list[tuple[int, _Row]]] = [[] for _ in range(num_segments)]  # group that a gradient arrives in, gradient
        for row in self.rows:
            if row.producer >= 0:
                self.outputs.setdefault(row.producer, []).append(row)
            if 0 <= row.producer < self.problem.num_ops and self.phase[row.producer] in (BACKWARD, BACKWARD_WEIGHT):
                home, count = self.segment[row.producer], self.problem.num_ops
                readers = [op for op in row.consumers if op < count and self.phase[op] in (BACKWARD, BACKWARD_WEIGHT)]
                ends = {self.group(op) for op in readers if 0 <= self.segment[op] != home}
                for group in sorted(ends):
                    entering[self.segment_of_group[group]].append((group, row))
        clones: list[list[int]] = [[] for _ in range(num_segments)]
        for op, clone in self.twin.items():
            clones[self.segment[op]].append(clone)
        for segment, members in enumerate(clones):
            led = {op for clone in members for row in self.outputs.get(clone, ()) for op in row.consumers}
            roots = [clone for clone in members if clone not in led]
            if roots:
                self._hold(roots, entering[segment])

    def _hold(self, roots: list[int], entering: list[tuple[int, _Row]]) -> None:
        later = self.after(roots)
        arriving: dict[int, list[_Row]] = {}
        for group, row in entering:
            if row.producer not in later:
                arriving.setdefault(group, []).append(row)
        for group, rows in arriving.items():
            here = [op for op in roots if self.group(op) == group]
            away = [op for op in roots if self.group(op) != group]
            if away:
                start = self.new_op(next(op for op in rows[0].consumers if self.group(op) == group))  # may run where it may
                self.starts[start] = None
                self._add(_Row(start, -1, 0, away))
                here.append(start)
            for row in rows:
                row.consumers += here
        if not arriving:  # the segment ends in the loss: its backward begins when its forward is through
            segment = self.segment[roots[0]]
            for op in [op for op in self.twin if self.segment[op] == segment]:
                following = {reader for row in self.outputs.get(op, ()) for reader in row.consumers}
                if following.isdisjoint(self.twin):
                    self._add(_Row(op, -1, 0, list(roots)))

    def _add(self, row: _Row) -> None:
        self.rows.append(row)
        self.outputs.setdefault(row.producer, []).append(row)

    def group(self, op: int) -> int:
        count = self.problem.num_ops
        return int(self.problem.op_group[op if op < count else self.origin[op - count]])

    def after(self, ops: Sequence[int]) -> set[int]:
        """The given ops and everything that waits for them."""
        found, pending = set(ops), list(ops)
        while pending:
            for row in self.outputs.get(pending.pop(), ()):
                fresh = set(row.consumers) - found
                found |= fresh
                pending.extend(fresh)
        return found

    def finish(self, segments: list[list[int]]) -> Problem:
        """The problem."""
        problem, origin = self.problem, np.array(self.origin, dtype=np.int64)
        idle = np.array([problem.num_ops + i in self.starts for i in range(len(origin))], dtype=bool)
        names = [
            (problem.group_names[problem.op_group[op]] if pause else problem.op_names[op]) + SUFFIX
            for op, pause in zip(origin.tolist(), idle.tolist(), strict=True)
        ]
        time_s = problem.time_s[origin]
        time_s[idle] *= 0.0  # where the group cannot run, neither can its start
        count = problem.num_ops
        kinds = problem.op_kind
        dims = {count + i: problem.op_dims[op] for i, op in enumerate(self.origin) if op in problem.op_dims and not idle[i]}
        return dataclasses.replace(
            problem,
            op_names=(*problem.op_names, *names),
            op_group=np.concatenate([problem.op_group, problem.op_group[origin]]),
            op_phase=np.concatenate([problem.op_phase, np.full(len(origin), BACKWARD, dtype=np.int8)]),
            time_s=np.concatenate([problem.time_s, time_s]),
            temporary_bytes=np.concatenate([problem.temporary_bytes, np.where(idle, 0, problem.temporary_bytes[origin])]),
            **tensor_fields([(row.producer, row.owner, row.size, row.consumers) for row in self.rows]),
            op_kind=None
            if kinds is None
            else (*kinds, *("view" if p else kinds[o] for o, p in zip(origin, idle, strict=True))),
            op_dims={**problem.op_dims, **dims},
            tensor_transfer_s={i: row.table for i, row in enumerate(self.rows) if row.table is not None},
            source={**(problem.source or {}), "recompute": segments},
        )
