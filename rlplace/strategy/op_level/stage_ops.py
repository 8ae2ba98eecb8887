"""Ops and collectives of a stage for one micro-batch in order, part by part, and lifetimes of their tensors.

A *part* is one action of a schedule: forward (F), the whole backward (B), or its halves (I, W). Blocks run one after another;
each begins and ends with a mark, an op without time at which parameters are there and gradients are ready. Recomputation comes
before the backward of its block. All ops of a part run in this order on one device, so that a tensor lives from the op that
makes it to its last reader in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD
from rlplace.strategy.blocks.op_costs import PassOps, StepOps
from rlplace.strategy.costs import BACKWARD_PASS, COLLECTIVE_KINDS, FORWARD_PASS, FULL

Ints = NDArray[np.int64]

_PHASES = {"B": (BACKWARD, BACKWARD_WEIGHT), "I": (BACKWARD,), "W": (BACKWARD_WEIGHT,)}


@dataclass(frozen=True, eq=False)
class PassRows:
    """L rows that run in this order.

    Attributes:
        op: int64 [L], the op of each row; -1 for marks and collectives.
        block: int64 [L].
        collective: int64 [L], index into `PassOps.collectives`, -1 for ops.
        begins, ends: Row of the marks of each block.
        first: int64 [N], row of each op, -1 where it has none here.
        again: int64 [N], row of its second run.
    """

    op: Ints
    block: Ints
    collective: Ints
    begins: dict[int, int]
    ends: dict[int, int]
    first: Ints
    again: Ints


@dataclass(frozen=True, eq=False)
class PassLifetimes:
    """Lifetimes of tensors that a part makes.

    Attributes:
        tensor: int64 [X].
        start: int64 [X], row of the part that makes it.
        end: int64 [X], row of the part in which it ends.
        late: bool [X], whether it ends in a later part: of a forward in the backward, of an input half in the weight half.
        half: int64 [X], row of the first half of a split backward in which a tensor of the forward ends, -1 where it stays.
        leaves: bool [X], whether another stage reads it.
    """

    tensor: Ints
    start: Ints
    end: Ints
    late: NDArray[np.bool_]
    half: Ints
    leaves: NDArray[np.bool_]


class StageOps:
    """The parts of a stage.

    Args:
        step: Ops of the model.
        passed: Their times and sizes.
        blocks: Blocks of the stage.
        recompute: For each block of the model its recomputation.
    """

    def __init__(self, step: StepOps, passed: PassOps, blocks: range, recompute: Sequence[int]) -> None:
        self.step, self.passed, self.blocks = step, passed, blocks
        self._how = how = np.array(list(recompute), dtype=np.int64)
        self.inside = (step.block >= blocks.start) & (step.block < blocks.stop)
        every = np.arange(len(step.block))
        self._again = step.again[how[step.block], every] & self.inside
        self._cached = step.cached[how[step.block], every]
        self.split = bool((step.phase == BACKWARD_WEIGHT).any())
        self.parts: dict[str, PassRows] = {}

    def part(self, kind: str) -> PassRows:
        """Returns the rows of a part."""
        if kind not in self.parts:
            self.parts[kind] = self._rows(kind)
        return self.parts[kind]

    def _rows(self, kind: str) -> PassRows:
        step, forward = self.step, kind == "F"
        count = len(step.block)
        marks = np.arange(self.blocks.start, self.blocks.stop)
        own = np.flatnonzero(self.inside & np.isin(step.phase, (FORWARD,) if forward else _PHASES[kind]))
        clones = np.zeros(0, dtype=np.int64) if forward else np.flatnonzero(self._again)
        moves = [
            (index, item.block, 1 if item.when == FORWARD_PASS else 2, item.place)
            for index, item in enumerate(self.passed.collectives)
            if item.block in self.blocks and self._runs(kind, item.when, item.block)
        ]
        move = np.array(moves, dtype=np.float64).reshape(-1, 4)
        block = np.concatenate([marks, step.block[clones], step.block[own], move[:, 1].astype(np.int64), marks])
        sizes = [len(marks), len(clones), len(own), len(move), len(marks)]
        group = np.repeat([0.0, 1.0, 1.0 if forward else 3.0, 0.0, 4.0], sizes)
        group[sum(sizes[:3]) : sum(sizes[:4])] = move[:, 2]
        place = np.concatenate([np.zeros(len(marks)), clones, own, move[:, 3], np.zeros(len(marks))])
        order = np.lexsort((place, group, block if forward else -block))
        none = np.full(len(marks), -1)
        op = np.concatenate([none, clones, own, np.full(len(move), -1), none])[order]
        collective = np.full(len(order), -1)
        collective[len(marks) + len(clones) + len(own) : len(order) - len(marks)] = move[:, 0]
        row = np.argsort(order)
        first, again = np.full((2, count), -1, dtype=np.int64)
        first[own] = row[len(marks) + len(clones) : len(marks) + len(clones) + len(own)]
        again[clones] = row[len(marks) : len(marks) + len(clones)]
        begins = dict(zip(marks.tolist(), row[: len(marks)].tolist(), strict=True))
        ends = dict(zip(marks.tolist(), row[len(order) - len(marks) :].tolist(), strict=True))
        return PassRows(op, block[order], collective[order], begins, ends, first, again)

    def _runs(self, kind: str, when: int, block: int) -> bool:
        """Returns whether a part runs a collective: those of the forward also where all of it runs again."""
        if kind == "F":
            return when == FORWARD_PASS
        if when == FORWARD_PASS:
            return bool(self._how[block] == FULL)
        return when == BACKWARD_PASS and kind != "W"

    def seconds(self, kind: str, collective_s: Sequence[float]) -> NDArray[np.float64]:
        """Returns float64 [L]."""
        part = self.part(kind)
        moved = np.array([*collective_s, 0.0])[part.collective]
        return np.where(part.op >= 0, self.passed.seconds[part.op], moved)

    def temporary_bytes(self, kind: str) -> Ints:
        """Returns int64 [L]."""
        part = self.part(kind)
        return np.where(part.op >= 0, self.passed.temporary_bytes[part.op], 0)

    def labels(self, kind: str) -> list[str]:
        """Returns names of the rows, for people."""
        part, names, moves = self.part(kind), self.step.names, self.passed.collectives
        found = []
        for row, (op, move, block) in enumerate(zip(part.op, part.collective, part.block, strict=True)):
            begins = "begin of block" if part.begins[int(block)] == row else "end of block"
            found.append(names[op] if op >= 0 else COLLECTIVE_KINDS[moves[move].kind] if move >= 0 else f"{begins} {block}")
        return found

    def lifetimes(self, kind: str) -> list[PassLifetimes]:
        """Returns the tensors that a part makes."""
        return [self._of_forward()] if kind == "F" else [self._of_clones(kind), self._of_backward(kind)]

    def _last(self, read: NDArray[np.bool_], rows: Ints) -> Ints:
        """Returns int64 [T], the last row (by op) of the readers of each tensor among `read`, bool [E]; -1 for none."""
        end = np.full(len(self.step.producer), -1, dtype=np.int64)
        np.maximum.at(end, self.step.tensor[read], rows[self.step.reader[read]])
        return end

    def _marked(self, read: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Marks [T] the tensors among `read`, bool [E]."""
        found = np.zeros(len(self.step.producer), dtype=bool)
        found[self.step.tensor[read]] = True
        return found

    def _of_forward(self) -> PassLifetimes:
        """Returns tensors of a forward: kept until the last backward that reads them, or begins where they are sent."""
        step, part, behind = self.step, self.part("F"), self.part("B")
        maker, reader, tensor = step.producer[step.tensor], step.reader, step.tensor
        makes = (step.producer >= 0) & self.inside[step.producer] & (step.phase[step.producer] == FORWARD) & ~step.is_gradient
        reads = makes[tensor] & (maker >= 0)
        remade = self._again[maker] & (step.block[maker] == step.block[reader])
        ahead, own = step.phase[reader] == FORWARD, reads & self.inside[reader]
        backward, repeated = own & ~ahead & ~remade, own & self._again[reader] & ~remade
        end = self._last(own & ahead, part.first)
        late_end = np.maximum(self._last(backward, behind.first), self._last(repeated, behind.again))
        cached = np.flatnonzero(makes & self._cached[step.producer])
        begins = np.array([behind.begins.get(block, -1) for block in range(int(step.block.max()) + 1)])
        late_end[cached] = np.maximum(late_end[cached], begins[step.block[step.producer[cached]]])
        leaves = self._marked(reads & ~self.inside[reader])
        late_end[leaves] = np.maximum(late_end[leaves], 0)
        made = np.flatnonzero(makes & (self.passed.tensor_bytes > 0))
        start = part.first[step.producer[made]]
        late, half = late_end[made] >= 0, np.full(len(step.producer), -1, dtype=np.int64)
        if self.split:
            stays = self._marked((backward & step.retained[reader]) | repeated)
            stays[cached] = True
            half = self._last(backward, self.part("I").first)
            half = np.where(stays, -1, np.where(leaves, np.maximum(half, 0), half))
        given = np.flatnonzero((step.input_block >= self.blocks.start) & (step.input_block < self.blocks.stop))
        given_block = step.input_block[given].tolist()
        ends = np.where(late, late_end[made], np.maximum(end[made], start))
        return PassLifetimes(
            tensor=np.concatenate([made, given]),
            start=np.concatenate([start, [part.begins[block] for block in given_block]]).astype(np.int64),
            end=np.concatenate([ends, [behind.ends[block] for block in given_block]]).astype(np.int64),
            late=np.concatenate([late, np.ones(len(given), dtype=bool)]),
            half=np.concatenate([half[made], np.full(len(given), -1)]),
            leaves=np.concatenate([leaves[made], np.zeros(len(given), dtype=bool)]),
        )

    def _of_clones(self, kind: str) -> PassLifetimes:
        """Returns recomputed tensors, which live until the end of their last reader in the part."""
        step, part = self.step, self.part(kind)
        maker, reader = np.maximum(step.producer[step.tensor], 0), step.reader
        makes = (step.producer >= 0) & self._again[step.producer] & (self.passed.tensor_bytes > 0)
        made = np.flatnonzero(makes)
        own, ahead = makes[step.tensor] & (step.block[maker] == step.block[reader]), step.phase[reader] == FORWARD
        end = np.maximum(self._last(own & ahead, part.again), self._last(own & ~ahead, part.first))
        start, none = part.again[step.producer[made]], np.zeros(len(made), dtype=bool)
        return PassLifetimes(made, start, np.maximum(end[made], start), none, np.full(len(made), -1), none)

    def _of_backward(self, kind: str) -> PassLifetimes:
        """Returns gradients of activations: for the part, for the weight half, or until the stage before has them."""
        step, part = self.step, self.part(kind)
        makes = (
            (step.producer >= 0) & (part.first[step.producer] >= 0) & (step.phase[step.producer] != FORWARD) & ~step.is_gradient
        )
        made = np.flatnonzero(makes & (self.passed.tensor_bytes > 0))
        reads, inside = makes[step.tensor], self.inside[step.reader]
        end = self._last(reads & inside, part.first)[made]
        late_end = self._last(reads & inside, self.part("W").first)[made] if kind == "I" else np.full(len(made), -1)
        start, late = part.first[step.producer[made]], late_end >= 0
        end = np.where(late, late_end, np.maximum(end, start))
        return PassLifetimes(made, start, end, late, np.full(len(made), -1), self._marked(reads & ~inside)[made])

    def gradients(self, kind: str) -> tuple[Ints, Ints, Ints]:
        """Returns rows that make gradients of weights, in order, their tensors and blocks."""
        step, part = self.step, self.part(kind)
        made = np.flatnonzero(step.is_gradient & (step.producer >= 0))
        made = made[part.first[step.producer[made]] >= 0]
        rows = part.first[step.producer[made]]
        order = np.argsort(rows, kind="stable")
        return rows[order], made[order], step.block[step.producer[made[order]]].astype(np.int64)
