"""The blocks of a draft on its devices: input of the block executor's kernel, for the op-level expansion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlplace.strategy.costs import Floats
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor import arrays as c
from rlplace.strategy.executor.meshes import Lane
from rlplace.strategy.executor.packing import Packer


class PlacedBlock(NamedTuple):
    """A block on one device of a place."""

    keeping: float  # see `rlplace.strategy.executor.rules`
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


_HELD = np.array(
    [(c.WEIGHTS, c.EXPERT_WEIGHTS), (c.GRADIENTS, c.EXPERT_GRADIENTS), (c.OPTIMIZER, c.EXPERT_OPTIMIZER)]
)  # fmt: skip
"""Columns of weights, gradients and optimizer state, with those of experts."""


def placed_blocks(draft: Draft, lane: Lane, packer: Packer) -> list[list[PlacedBlock]]:
    """Returns for each place of a lane all blocks of the model on it, for one pass of the slowest replica."""
    from rlplace.strategy.executor import passkernels as k
    from rlplace.strategy.executor.kernel import place_blocks

    columns = [
        k.HOW, k.GATHER, k.REDUCE, k.COPIES, k.UPDATE, k.BUCKETS, k.WEIGHTS, k.GRADIENTS, k.BUFFER, k.STATIC,
    ]  # fmt: skip
    ties, found = packer.ties(packer.frame(draft), draft), []
    for number in range(len(draft.places)):
        at = packer.lane_place(draft, lane, number)
        placed = place_blocks(at, packer.choices(draft), ties)[:, columns]
        rows = np.concatenate([placed, at.row[:, [c.SENT, c.RETURNED]]], axis=1).tolist()
        found.append([PlacedBlock(*block) for block in rows])
    return found


def held_bytes(draft: Draft, lane: Lane, packer: Packer) -> Floats:
    """Returns float64 [P, 3], weights, gradients and optimizer state that a device of each place holds all step long."""
    from rlplace.strategy.executor import passkernels as k
    from rlplace.strategy.executor.kernel import place_blocks

    ties = packer.ties(packer.frame(draft), draft)
    found = np.zeros((len(draft.places), len(_HELD)))
    for number in range(len(draft.places)):
        at = packer.lane_place(draft, lane, number)
        for part in range(len(_HELD)):
            alone = at.row.copy()  # held bytes are a sum over the three: zero two of them for the third
            alone[:, np.delete(_HELD, part, axis=0).ravel()] = 0.0
            placed = place_blocks(at._replace(row=alone), packer.choices(draft), ties)
            found[number, part] = placed[draft.blocks_of(number), k.STATIC].sum()
    return found


def received_bytes(draft: Draft, lane: Lane, rows: Sequence[PlacedBlock], place: int) -> float:
    """Returns torch's receive buffers on a device of a place, one for every micro-batch; `rows` are its blocks."""
    received = 0.0
    for stage, inside in enumerate(draft.ranges):
        if draft.place_of_stage[stage] == place:
            sent = rows[inside.start - 1].sent_bytes if stage > 0 else 0.0
            returned = rows[inside.stop - 1].returned_bytes if stage < draft.stages - 1 else 0.0
            received += lane.microbatches * (sent + returned)
    return received
