"""Made-up costs, op by op: what `random_costs` says of blocks, spread over ten pieces of a forward and of a backward.

Two pieces and what they make run again where recomputation is selective, all ten where it is full; an eleventh, without time,
makes what a block hands on, which is always kept.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD
from rlplace.strategy.blocks.op_costs import PassOps, StepOps, TensorCollective
from rlplace.strategy.costs import COLLECTIVE_KINDS, FULL, NONE, RINGS, SELECTIVE, Cut
from tests.strategy.random_costs import RandomCosts

PIECES, SELECTED = 10, 2


class RandomOps(RandomCosts):
    """`OpCosts` of a made-up model; forward ops by block and piece, then backward ops, each followed by its weight gradient."""

    @staticmethod
    def of(costs: RandomCosts) -> RandomOps:
        return RandomOps(**{item.name: getattr(costs, item.name) for item in dataclasses.fields(costs)})

    def step_ops(self, split: bool) -> StepOps:
        if ("step", split) in self.known:
            return self.known["step", split]  # type: ignore[return-value]
        blocks, wide = len(self.names), PIECES + 1
        ops = blocks * wide
        halves = [BACKWARD, BACKWARD_WEIGHT] if split else [BACKWARD]
        step = len(halves)

        def backward(op: int) -> int:  # of a block the last forward piece is the first backward one
            block, piece = divmod(op, wide)
            return ops + step * (block * wide + wide - 1 - piece)

        tensors: list[tuple[int, list[int]]] = []
        for op in range(ops):
            after = [backward(op) + 1] if split else []
            if op % wide == PIECES:  # what the block hands on
                tensors.append((op, [backward(op - PIECES), *after, *([op + 1] if op + 1 < ops else [])]))
                first = op - PIECES  # its gradient
                tensors.append((backward(first), [backward(first - 1)] if first else []))
            else:
                tensors.append((op, [backward(op), *after]))
        last = range(ops + step - 1, ops + step * ops, step)
        gradients = [(op, []) for op in last]
        between = [(op - 1, [op]) for op in last] if split else []  # what weight gradients are made from
        rows = [*tensors, *between, *gradients]
        edges = [(tensor, reader) for tensor, (_, readers) in enumerate(rows) for reader in readers]
        again = np.zeros((3, ops + step * ops), dtype=bool)
        piece = np.arange(ops) % wide
        again[SELECTIVE, :ops], again[FULL, :ops] = piece < SELECTED, piece < PIECES
        found = StepOps(
            names=[f"op{number}" for number in range(again.shape[1])],
            phase=np.concatenate([np.full(ops, FORWARD), np.tile(halves, ops)]).astype(np.int8),
            block=np.concatenate([np.arange(ops), np.repeat(np.arange(ops), step)]).astype(np.int32) // wide,
            producer=np.array([producer for producer, _ in rows]),
            input_block=np.full(len(rows), -1),
            is_gradient=np.arange(len(rows)) >= len(tensors) + len(between),
            tensor=np.array([tensor for tensor, _ in edges]),
            reader=np.array([reader for _, reader in edges]),
            again=again,
            cached=np.zeros_like(again),
            retained=np.ones(again.shape[1], dtype=bool),
        )
        self.known["step", split] = found
        return found

    def pass_ops(self, kind: int, cut: Cut, split: bool) -> PassOps:
        passes, step, wide = self.passes(kind, cut), self.step_ops(split), PIECES + 1
        blocks = len(self.names)
        ops = blocks * wide
        piece = np.concatenate([np.arange(ops), np.repeat(np.arange(ops), len(step.phase) // ops - 1)]) % wide
        timed = np.where(step.phase == FORWARD, piece < PIECES, piece > 0) / PIECES
        weight = passes.weight_s if split else 0.0 * passes.weight_s
        whole = np.stack([passes.forward_s, passes.backward_s - weight, weight])
        row = np.select([step.phase == FORWARD, step.phase == BACKWARD], [0, 1], 2)
        temporary = np.zeros(len(step.phase), dtype=np.int64)
        last = (step.phase == FORWARD) & (piece == PIECES - 1)
        temporary[last] = passes.working_bytes[0, NONE, step.block[last]]
        first = (step.phase == BACKWARD) & (piece == 0)
        temporary[first] = (passes.kept_bytes[NONE] - passes.kept_bytes[FULL])[step.block[first]] // 3
        size = np.zeros(len(step.producer), dtype=np.int64)
        kept = passes.kept_bytes[:, step.block[step.producer]]
        place, phase = piece[step.producer], step.phase[step.producer]
        ahead = phase == FORWARD
        part = np.where(
            place < SELECTED, (kept[NONE] - kept[SELECTIVE]) // SELECTED, (kept[SELECTIVE] - kept[FULL]) // (PIECES - SELECTED)
        )
        size[ahead] = np.where(place < PIECES, part, kept[FULL])[ahead]
        behind = ~ahead & ~step.is_gradient
        block = step.block[step.producer[behind]]
        size[behind] = np.where(block > 0, passes.returned_bytes[block - 1], 0)
        between = behind & (np.arange(len(size)) >= ops + blocks)
        size[between] = np.where(place > 0, (kept[NONE] - kept[FULL]) * self.between // PIECES, 0)[between]
        weights = self.held(cut.tensor, cut.expert).gradient_bytes
        grown = step.is_gradient & (place > 0)
        size[grown] = weights[step.block[step.producer[grown]]] // PIECES
        collectives = [
            TensorCollective(
                b,
                way,
                number,
                passes.collective_bytes[way, number, b] / calls,
                b * wide + 0.5 + call,
                passes.hidden_s[way, b] * (number in RINGS) / calls,
            )
            for b in range(blocks)
            for way in range(2)
            for number in range(len(COLLECTIVE_KINDS))
            if (calls := int(passes.collective_calls[way, number, b]))
            for call in range(calls)
        ]
        return PassOps(whole[row, step.block] * timed, temporary, size, tuple(collectives))
