"""The block executor, plainly: what a step of one stage takes, and what an action of a pipeline's stage takes.

The rules are those of `rlplace.strategy.executor`; `reference_executor` puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.strategy.costs import BACKWARD_PASS, FORWARD_PASS, Floats
from rlplace.strategy.executor.rules import (
    BUCKET,
    EACH_BACKWARD,
    EACH_PASS,
    FIRST_BUCKET,
    ONCE,
    SLOWDOWN,
    WHOLE,
    at_once_s,
    hidden_buckets,
    slowed_s,
    wider,
)
from rlplace.strategy.executor.traffic import table_s
from tests.strategy.reference_blocks import Block


@dataclass
class Work:
    """What a place spends its time on, in seconds."""

    compute: float = 0.0
    tensor: float = 0.0
    gather: float = 0.0
    exchange: float = 0.0
    hand_over: float = 0.0
    end_s: float = 0.0


def forward_s(blocks: Sequence[Block], first: bool) -> float:
    """A forward: the parameters of the next block are gathered while one computes."""
    gathers = [
        block.gather_s if block.keeping == EACH_PASS or (first and block.keeping in (ONCE, EACH_BACKWARD)) else 0.0
        for block in blocks
    ] + [0.0]
    seconds = gathers[0]
    for block, gather in zip(blocks, gathers[1:], strict=True):
        compute_s, tensor_s = block.compute_s[FORWARD_PASS], block.tensor_s[FORWARD_PASS]
        held_up_s = at_once_s(block.meets_blocks, compute_s, tensor_s, gather)
        seconds += max(slowed_s(compute_s, tensor_s, gather, held_up_s), gather + held_up_s)
    return seconds


def backward_s(blocks: Sequence[Block], last: bool, all_reduce: Floats) -> float:
    """A backward of a single stage.

    While a block computes, the gradient of the one after it is reduced and the parameters of the one before it are gathered.
    Shares are all-reduced over copies beside all that, as are whole gradients, in buckets, in the last micro-batch. Where both
    use one channel, copies go after what is gathered and reduced beside the same block.
    """
    gathers = [0.0] + [block.gather_s if block.keeping == EACH_PASS else 0.0 for block in blocks]
    reduces, copies = [0.0] * (len(blocks) + 1), [0.0] * (len(blocks) + 1)
    for index, block in enumerate(blocks):
        if block.keeping in (EACH_BACKWARD, EACH_PASS) or (last and block.keeping == ONCE):
            reduces[index], copies[index] = block.reduce_s, block.copies_s
    total, compute_s = 0.0, 0.0
    for block in reversed(blocks):
        total += block.bucket_bytes if last else 0.0
        compute_s += block.compute_s[BACKWARD_PASS]
    slower = 1.0
    if total > FIRST_BUCKET and compute_s > 0.0:
        under = table_s(all_reduce, FIRST_BUCKET) + hidden_buckets(total) * table_s(all_reduce, BUCKET)
        slower = 1.0 + SLOWDOWN * (min(under, compute_s) / compute_s)
    time, sent, filled, limit = gathers[len(blocks)], 0.0, 0.0, FIRST_BUCKET
    for index in reversed(range(len(blocks))):
        block, start = blocks[index], time
        own_s, tensor_s = block.compute_s[BACKWARD_PASS] * slower, block.tensor_s[BACKWARD_PASS]
        waits = reduces[index + 1] + gathers[index]
        moving = waits + copies[index + 1]
        held_up_s = at_once_s(block.meets_blocks, own_s, tensor_s, moving)
        times = wider(moving, held_up_s)
        moved = waits * times + (max(start, sent) if block.meets_copies else start)
        copied_from = moved if block.meets_copies else max(sent, start + reduces[index + 1] * times)
        sent = copied_from + copies[index + 1] * times
        time = start + slowed_s(own_s, tensor_s, moving, held_up_s)
        if waits > 0.0:
            time = max(time, moved)
        left = block.bucket_bytes if last else 0.0
        done = 0.0
        while left > 0.0:
            take = min(limit - filled, left)
            filled, left, done = filled + take, left - take, done + take
            if filled >= limit:
                ready = start + (time - start) * (done / block.bucket_bytes)
                sent = max(sent, ready) + table_s(all_reduce, limit)
                filled, limit = 0.0, BUCKET
    if filled > 0.0:
        sent = max(sent, time) + table_s(all_reduce, filled)
    if blocks[0].meets_copies:
        return max(sent, time) + reduces[0] + copies[0]
    return max(sent, time + reduces[0]) + copies[0]


def exchange_s(blocks: Sequence[Block]) -> float:
    """Gradients of a stage of a pipeline, after its last backward: reduced block by block, copies beside that."""
    reduced, copied = 0.0, 0.0
    for block in reversed(blocks):
        if block.keeping != WHOLE:
            reduced += block.reduce_s
            copied = max(copied, reduced) + block.copies_s
            reduced = copied if block.meets_copies else reduced
    return max(reduced, copied)


def single_stage(blocks: Sequence[Block], microbatches: int, all_reduce: Floats) -> Work:
    """The passes of one stage, one after another."""
    forwards = forward_s(blocks, True), forward_s(blocks, False)
    backwards = backward_s(blocks, True, all_reduce), backward_s(blocks, False, all_reduce)
    forward = forwards[0] + (microbatches - 1) * forwards[1]
    backward = backwards[0] + (microbatches - 1) * backwards[1]
    work = Work(end_s=forward + backward)
    plain = [[0.0, 0.0], [0.0, 0.0]]
    gathered, reduced = 0.0, 0.0
    for block in blocks:
        for way in (FORWARD_PASS, BACKWARD_PASS):
            plain[way][0] += block.compute_s[way]
            plain[way][1] += block.tensor_s[way]
        gathered += block.gather_s if block.keeping == EACH_PASS else 0.0
        reduced += block.reduce_s + block.copies_s if block.keeping else block.bucket_bytes
    work.compute = microbatches * (plain[0][0] + plain[1][0])
    work.tensor = microbatches * (plain[0][1] + plain[1][1])
    exposed = max(0.0, backward - microbatches * (plain[1][0] + plain[1][1]))
    part = gathered / (gathered + reduced) if gathered > 0.0 else 0.0
    work.gather = max(0.0, forward - microbatches * (plain[0][0] + plain[0][1])) + exposed * part
    work.exchange = exposed * (1.0 - part)
    return work


def stage_action(blocks: Sequence[Block], kind: str, first: bool) -> tuple[float, float, float]:
    """Seconds of ops, of collectives inside blocks, and of waiting for parameters."""
    pieces = stage_pieces(blocks, kind)
    compute, tensor = (sum(column) for column in zip(*pieces, strict=True))
    gather = max(0.0, forward_s(blocks, True) - compute - tensor) if kind == "F" and first else 0.0
    return compute, tensor, gather


def stage_pieces(blocks: Sequence[Block], kind: str) -> list[tuple[float, float]]:
    """For each block in model order its seconds of ops, and of collectives inside it."""
    if kind == "F":
        return [(block.compute_s[FORWARD_PASS], block.tensor_s[FORWARD_PASS]) for block in blocks]
    if kind == "W":
        return [(block.weight_s + block.again_s, block.weight_tensor_s) for block in blocks]
    put_off = [block.weight_s if kind == "I" else 0.0 for block in blocks]
    return [
        (block.compute_s[BACKWARD_PASS] - later, block.tensor_s[BACKWARD_PASS])
        for block, later in zip(blocks, put_off, strict=True)
    ]
