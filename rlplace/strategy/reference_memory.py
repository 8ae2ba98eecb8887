"""Memory of a draft, plainly: what a device holds all step long, and what its actions add on top.

Activations are counted by running a place's actions in order; times play no part.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.strategy.costs import BACKWARD_PASS, FORWARD_PASS, STAGE_END, WITH_GRADIENTS
from rlplace.strategy.drafts import Draft
from rlplace.strategy.meshes import Lane, stage_actions
from rlplace.strategy.reference_blocks import Block
from rlplace.strategy.rules import EACH_BACKWARD, EACH_PASS, FULL_OFFLOAD, ONCE, WHOLE


def device_bytes(draft: Draft, place: int, lane: Lane, blocks: Sequence[Block], leaving: Sequence[float]) -> float:
    """The most that a device of a place holds, reserved bytes apart; see `action_bytes`."""
    total, actions = action_bytes(draft, place, lane, blocks, leaving)
    return total + max((during for during, _ in actions), default=0.0)


def action_bytes(
    draft: Draft, place: int, lane: Lane, blocks: Sequence[Block], leaving: Sequence[float]
) -> tuple[float, list[tuple[float, float]]]:
    """What a device of a place holds all step long, and on top of it, for its actions in order, the most during and after each.

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
    held, found = 0.0, []
    left = {stage: lane.microbatches for stage in holds}
    for (stage, kind, _), sends in zip(stage_actions(draft, lane.microbatches)[place], leaving, strict=True):
        kept, forward, backward, half, between, weight, exchange = holds[stage]
        during = 0.0
        if kind == "F":
            during = held + sends + forward
            held += kept
        elif kind in "BI":
            during = held + sends - kept + (backward if kind == "B" else half)
        if kind == "I":
            held += between - kept
        if kind == "W":
            during = held + sends + weight
            held += kept - between
        if kind in "BW":
            held -= kept
            left[stage] -= 1
            if left[stage] == 0:
                during = max(during, held + exchange)
        found.append((during, held))
    return total, found


def stage_bytes(draft: Draft, lane: Lane, rows: Sequence[Sequence[Block]]) -> list[float]:
    """For each stage what it holds for itself, with the activations of its micro-batches in flight."""
    found = []
    actions = stage_actions(draft, lane.microbatches)
    for stage, inside in enumerate(draft.ranges):
        place = draft.place_of_stage[stage]
        blocks = rows[place]
        total = sum(static_bytes(block, draft.stages, lane.microbatches) for block in blocks[inside.start : inside.stop])
        in_flight, most = 0, 0
        for other, kind, _ in actions[place]:
            if other == stage:
                in_flight += 1 if kind == "F" else -1 if kind in "BW" else 0
                most = max(most, in_flight)
        total += received_bytes(draft, stage, lane.microbatches, blocks)
        found.append(total + most * _pass_bytes(draft, stage, lane.microbatches, blocks)[0])
    return found


def static_bytes(block: Block, stages: int, microbatches: int) -> float:
    """What a block holds from its first gather to the end of the step."""
    weights, gradients, optimizer = block.shared_bytes
    total = 0.0 if block.offload else optimizer
    total += 0.0 if block.offload == FULL_OFFLOAD else weights
    if block.keeping in (ONCE, EACH_BACKWARD):
        total += block.weight_bytes
    if block.keeping == WHOLE or (block.keeping == ONCE and (microbatches > 1 or stages > 1)):
        total += block.gradient_bytes
    elif block.offload != FULL_OFFLOAD:
        total += gradients
    return total


def host_bytes(block: Block) -> float:
    """What of a block a device has in its host's memory."""
    if block.offload == FULL_OFFLOAD:
        return sum(block.shared_bytes)
    return block.shared_bytes[2] if block.offload else 0.0


def received_bytes(draft: Draft, stage: int, microbatches: int, blocks: Sequence[Block]) -> float:
    """Torch's stages receive every micro-batch's input and gradient in a buffer of its own, made once."""
    inside = draft.ranges[stage]
    received = blocks[inside.start - 1].sent_bytes if stage > 0 else 0.0
    returned = blocks[inside.stop - 1].returned_bytes if stage < draft.stages - 1 else 0.0
    return microbatches * (received + returned)


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
