"""Rules that the compiled and the plain block executor share; `rlplace.strategy.executor` states them all."""

from __future__ import annotations

from rlplace.cluster.collectives import COMPUTE_SLOWDOWN

FULL_OFFLOAD = 2
"""Index of ``"all"`` in `rlplace.strategy.drafts.OFFLOAD`."""

WHOLE, ONCE, EACH_BACKWARD, EACH_PASS = range(4)
"""Ways to keep a block's weights: whole; gathered once a step, gradients reduced once a step; likewise, gradients reduced every
micro-batch; gathered for every forward and backward, gradients reduced every micro-batch. Sharding levels by number, but for
`keeping`."""

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
    """Returns seconds by which collectives inside blocks and communication beside these blocks delay each other.

    Where both use one channel (`meets` is 1, else 0), each gets half of it while both want it: the communication beside the
    blocks, `moving_s`, finds collectives inside them on the channel for their part of the blocks' time.
    """
    inside_s = compute_s + tensor_s
    return meets * tensor_s * (min(moving_s, inside_s) / inside_s) if inside_s > 0.0 else 0.0


def slowed_s(compute_s: float, tensor_s: float, moving_s: float, held_up_s: float) -> float:
    """Returns seconds of a pass of a block beside communication of `moving_s`; see `at_once_s`."""
    return compute_s + tensor_s + held_up_s + SLOWDOWN * min(compute_s, moving_s)


def wider(moving_s: float, held_up_s: float) -> float:
    """Returns the factor on communication beside a block; see `at_once_s`."""
    return 1.0 + held_up_s / moving_s if moving_s > 0.0 else 1.0


def hidden_buckets(gradient_bytes: float) -> float:
    """Returns how many buckets of 25 MiB are full and not the last one, after a first bucket of 1 MiB."""
    rest = gradient_bytes - FIRST_BUCKET
    if rest <= 0.0:
        return 0.0
    full = rest // BUCKET
    return full if rest > full * BUCKET else full - 1.0
