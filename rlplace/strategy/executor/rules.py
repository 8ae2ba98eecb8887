"""Rules that the block executor's two forms share: numbers, names, and how communication and compute run side by side.

`rlplace.strategy.executor` states every rule. Compiled code runs these functions, too.
"""

from __future__ import annotations

from rlplace.cluster.collectives import COMPUTE_SLOWDOWN

OPTIMIZER_OFFLOAD, FULL_OFFLOAD = 1, 2
"""Indices of `rlplace.strategy.drafts.OFFLOAD`."""

WHOLE, ONCE, EACH_BACKWARD, EACH_PASS = range(4)
"""How a block's weights are kept: whole; gathered once a step, gradients reduced once a step; likewise, gradients reduced every
micro-batch; gathered for every forward and backward, gradients reduced every micro-batch. Sharding levels by number, except
where `keeping` says otherwise."""

SLOWDOWN = COMPUTE_SLOWDOWN - 1.0
FIRST_BUCKET = float(1 << 20)
BUCKET = float(25 << 20)


def keeping(sharding: int, offload: int, stages: int, copies: int) -> int:
    """Returns how a block is kept.

    In a pipeline torch's `replicate` is `fully_shard` over one device: it has the weights twice and exchanges whole gradients
    after the last backward. Blocks that live in host memory stream in as `fully_shard` gathers, at level 0 over one device.
    """
    if stages > 1:
        return ONCE if sharding > 0 or offload == FULL_OFFLOAD or copies > 1 else WHOLE
    return EACH_PASS if sharding == 0 and offload == FULL_OFFLOAD else sharding


def at_once_s(meets: float, compute_s: float, tensor_s: float, moving_s: float) -> float:
    """Returns seconds by which collectives inside blocks and what moves beside these blocks hold each other up.

    Where both use one channel, each gets half of it while both want it: what moves finds collectives inside the blocks on the
    channel for their part of the blocks' time.

    Args:
        meets: 1 where they use a channel together, else 0.
        compute_s: Ops of the blocks.
        tensor_s: Collectives inside the blocks, which block their ops.
        moving_s: Communication beside the blocks.
    """
    inside_s = compute_s + tensor_s
    return meets * tensor_s * (min(moving_s, inside_s) / inside_s) if inside_s > 0.0 else 0.0


def slowed_s(compute_s: float, tensor_s: float, moving_s: float, held_up_s: float) -> float:
    """Returns seconds of a pass of a block while its neighbours' parameters and gradients move for `moving_s`; see
    `at_once_s`.
    """
    return compute_s + tensor_s + held_up_s + SLOWDOWN * min(compute_s, moving_s)


def wider(moving_s: float, held_up_s: float) -> float:
    """Returns factor on communication beside a block; see `at_once_s`."""
    return 1.0 + held_up_s / moving_s if moving_s > 0.0 else 1.0


def hidden_buckets(gradient_bytes: float) -> float:
    """Full buckets of 25 MiB that are not the last one, when so many bytes fill a first bucket of 1 MiB, then these."""
    rest = gradient_bytes - FIRST_BUCKET
    if rest <= 0.0:
        return 0.0
    full = rest // BUCKET
    return full if rest > full * BUCKET else full - 1.0
