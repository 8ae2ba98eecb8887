"""The blocks of a draft as devices have them: what the block executor works on, read for the op-level expansion."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlplace.strategy import columns as c
from rlplace.strategy.drafts import Draft
from rlplace.strategy.meshes import Lane
from rlplace.strategy.packing import Packer


class Block(NamedTuple):
    """A block on one device of a place; how it is kept is a number of `rlplace.strategy.rules`."""

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


def placed_blocks(draft: Draft, lane: Lane, packer: Packer) -> list[list[Block]]:
    """For each place of a lane all blocks of the model as they would be there, for one pass of the slowest replica."""
    from rlplace.strategy import passkernels as k
    from rlplace.strategy.kernel import place_blocks

    columns = [
        k.HOW, k.GATHER, k.REDUCE, k.COPIES, k.UPDATE, k.BUCKETS, k.WEIGHTS, k.GRADIENTS, k.BUFFER, k.STATIC,
    ]  # fmt: skip
    ties = packer.ties(packer.frame(draft), draft)
    chosen = [np.frombuffer(values, dtype=np.uint8) for values in (draft.recompute, draft.offload)]
    found = []
    for place, replicas in zip(draft.places, lane.replicas, strict=True):
        costed = packer.costed
        row, tables = costed.rows[costed.number(place, costed.passes(replicas))], packer.traffic.tables
        own = np.array(costed.place(place))
        placed = place_blocks(row, own, tables, *chosen, ties.block, ties.again_bytes, draft.stages, lane.microbatches)
        sent = row[:, [c.SENT, c.RETURNED]]
        found.append([Block(*block) for block in np.concatenate([placed[:, columns], sent], axis=1).tolist()])
    return found
