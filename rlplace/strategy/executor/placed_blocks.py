"""The blocks of a draft as devices have them: what the block executor works on, read for the op-level expansion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rlplace.strategy.costs import Floats
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor import columns as c
from rlplace.strategy.executor.meshes import Lane
from rlplace.strategy.executor.packing import Packer


class PlacedBlock(NamedTuple):
    """A block on one device of a place; how it is kept is a number of `rlplace.strategy.executor.rules`."""

    keeping: float
    gather_s: float
    reduce_s: float
    copies_s: float
    update_s: float
    bucket_bytes: float
    weight_bytes: float
    gradient_bytes: float
    buffer_bytes: float  # flat copy of the gradient while it is exchanged
    static_bytes: float  # held from its first gather to the end of the step
    sent_bytes: float
    returned_bytes: float


_HELD = (c.WEIGHTS, c.EXPERT_WEIGHTS), (c.GRADIENTS, c.EXPERT_GRADIENTS), (c.OPTIMIZER, c.EXPERT_OPTIMIZER)
"""Columns of weights, gradients and optimizer state, with those of experts."""


def placed_blocks(draft: Draft, lane: Lane, packer: Packer) -> list[list[PlacedBlock]]:
    """For each place of a lane all blocks of the model as they would be there, for one pass of the slowest replica."""
    from rlplace.strategy.executor import passkernels as k
    from rlplace.strategy.executor.kernel import place_blocks

    columns = [
        k.HOW, k.GATHER, k.REDUCE, k.COPIES, k.UPDATE, k.BUCKETS, k.WEIGHTS, k.GRADIENTS, k.BUFFER, k.STATIC,
    ]  # fmt: skip
    ties = packer.ties(packer.frame(draft), draft)
    chosen = [np.frombuffer(values, dtype=np.uint8) for values in (draft.recompute, draft.offload)]
    found = []
    for own, row in _rows(draft, lane, packer):
        tables = packer.traffic.tables
        placed = place_blocks(row, own, tables, *chosen, ties.block, ties.again_bytes, draft.stages, lane.microbatches)
        sent = row[:, [c.SENT, c.RETURNED]]
        found.append([PlacedBlock(*block) for block in np.concatenate([placed[:, columns], sent], axis=1).tolist()])
    return found


def held_bytes(draft: Draft, lane: Lane, packer: Packer) -> Floats:
    """Returns float64 [P, 3], weights, gradients and optimizer state that a device of each place holds all step long."""
    from rlplace.strategy.executor import passkernels as k
    from rlplace.strategy.executor.kernel import place_blocks

    ties = packer.ties(packer.frame(draft), draft)
    chosen = [np.frombuffer(values, dtype=np.uint8) for values in (draft.recompute, draft.offload)]
    found = np.zeros((len(draft.places), len(_HELD)))
    for number, (own, row) in enumerate(_rows(draft, lane, packer)):
        for part in range(len(_HELD)):
            alone = row.copy()  # what is held is a sum over the three: alone with one of them it is that one's part
            alone[:, [column for other in (*_HELD[:part], *_HELD[part + 1 :]) for column in other]] = 0.0
            how = draft.stages, lane.microbatches
            placed = place_blocks(alone, own, packer.traffic.tables, *chosen, ties.block, ties.again_bytes, *how)
            found[number, part] = placed[draft.blocks_of(number), k.STATIC].sum()
    return found


def received_bytes(draft: Draft, lane: Lane, rows: Sequence[PlacedBlock], place: int) -> float:
    """Torch's buffers on a device of a place, for what other stages send: one for every micro-batch; `rows` are its blocks."""
    received = 0.0
    for stage, inside in enumerate(draft.ranges):
        if draft.place_of_stage[stage] == place:
            sent = rows[inside.start - 1].sent_bytes if stage > 0 else 0.0
            returned = rows[inside.stop - 1].returned_bytes if stage < draft.stages - 1 else 0.0
            received += lane.microbatches * (sent + returned)
    return received


def _rows(draft: Draft, lane: Lane, packer: Packer) -> Iterator[tuple[Floats, Floats]]:
    """Yields every place of a lane as columns, with the costs of all blocks there."""
    costed = packer.costed
    for place, replicas in zip(draft.places, lane.replicas, strict=True):
        yield np.array(costed.place(place)), costed.rows[costed.number(place, costed.passes(replicas))]
