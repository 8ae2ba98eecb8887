"""Memory of a draft, plainly: what a device holds all step long, and what its actions add on top.

Activations are counted by running a place's actions in order; times play no part.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.strategy.costs import BACKWARD_PASS, FORWARD_PASS, STAGE_END, WITH_GRADIENTS
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.meshes import Lane, stage_actions
from rlplace.strategy.executor.rules import EACH_BACKWARD, EACH_PASS, FULL_OFFLOAD, ONCE
from tests.strategy.reference_blocks import Block, received_bytes, static_bytes


def device_bytes(draft: Draft, place: int, lane: Lane, blocks: Sequence[Block], leaving: Sequence[float]) -> float:
    """The most that a device of a place holds, reserved bytes apart.

    Args:
        draft: The draft.
        place: Number of the place.
        lane: The lane that the device belongs to.
        blocks: All blocks as they are on the place.
        leaving: For each action the bytes that earlier ones are still sending.
    """
    total = 0.0
    holds: dict[int, tuple[float, ...]] = {}
    for stage, inside in enumerate(draft.ranges):
        if draft.place_of_stage[stage] == place:
            own = blocks[inside.start : inside.stop]
            total += sum(static_bytes(block, draft.stages, lane.microbatches) for block in own)
            total += received_bytes(draft, stage, lane.microbatches, blocks)
            holds[stage] = _pass_bytes(draft, stage, lane.microbatches, blocks)
    held, peak = 0.0, 0.0
    left = {stage: lane.microbatches for stage in holds}
    for (stage, kind, _), sends in zip(stage_actions(draft, lane.microbatches)[place], leaving, strict=True):
        kept, forward, backward, half, between, weight, exchange = holds[stage]
        if kind == "F":
            peak = max(peak, held + sends + forward)
            held += kept
        elif kind in "BI":
            peak = max(peak, held + sends - kept + (backward if kind == "B" else half))
        if kind == "I":
            held += between - kept
        if kind == "W":
            peak = max(peak, held + sends + weight)
            held += kept - between
        if kind in "BW":
            held -= kept
            left[stage] -= 1
            if left[stage] == 0:
                peak = max(peak, held + exchange)
    return total + peak


def host_bytes(block: Block) -> float:
    """What of a block a device has in its host's memory."""
    if block.offload == FULL_OFFLOAD:
        return sum(block.shared_bytes)
    return block.shared_bytes[2] if block.offload else 0.0


def _pass_bytes(draft: Draft, stage: int, microbatches: int, blocks: Sequence[Block]) -> tuple[float, ...]:
    """Bytes of a micro-batch.

    What it leaves from forward to backward; the most during forward, backward and the first half of a split one; what it leaves
    between the halves; what the second half and the exchange add.

    On top of what blocks up to the one that runs have kept comes: what it works with; its parameters and those of the next
    one, gathered where they are not kept (before it runs a block is there twice, flat and as parameters); its unsharded
    gradient, with the flat copy of the last block's that is being reduced, and at its end its own. The first half of a split
    backward frees nothing before it ends, and keeps the gradients that those of weights are made from.
    """
    inside = draft.ranges[stage]
    own = blocks[inside.start : inside.stop]
    gathered = [0.0, *(block.weight_bytes if block.keeping == EACH_PASS else 0.0 for block in own), 0.0]
    single = draft.stages == 1
    buffers = [block.buffer_bytes if single else 0.0 for block in own] + [0.0]
    kept, forward, backward, half, weight = 0.0, 0.0, 0.0, 0.0, 0.0
    returned = blocks[inside.start - 1].returned_bytes if stage > 0 else 0.0
    for index, block in enumerate(own):
        before, kept = kept, kept + block.kept_bytes
        here, ahead, behind = gathered[index + 1], gathered[index + 2], gathered[index]
        forward = max(forward, before + 2 * here, kept + block.working_bytes[FORWARD_PASS] + here + ahead)
        passing = block.keeping in (EACH_BACKWARD, EACH_PASS) or (block.keeping == ONCE and single and microbatches == 1)
        gradient = block.gradient_bytes if passing else 0.0
        at_end = index + 1 == len(own) and stage < draft.stages - 1
        working = block.working_bytes[STAGE_END if at_end else BACKWARD_PASS]
        if passing:
            working = min(working + gradient, block.working_bytes[WITH_GRADIENTS])
        running = working + here + behind + buffers[index + 1]
        ends = before + here + behind + gradient + buffers[index]
        backward = max(backward, kept + 2 * here + buffers[index + 1], kept + running, ends)
        left = max(0.0, block.halved_bytes - block.kept_bytes)
        weight = max(weight - left, block.remade_bytes)
        half = max(half + left, running, left + (returned if index == 0 else 0.0))
    exchange = 0.0 if single else max(block.buffer_bytes for block in own)
    return kept, forward, backward, kept + half, sum(block.halved_bytes for block in own), weight, exchange
