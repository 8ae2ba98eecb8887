"""Rules that the block executor's two forms share: numbers, names, and how communication and compute run side by side.

docs/cost-model/strategy.md states every rule with its source. Compiled code runs the very functions that stand here.
"""

from __future__ import annotations

from rlplace.problem.collectives import COMPUTE_SLOWDOWN

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
    """How a block is kept.

    In a pipeline torch's `replicate` is `fully_shard` over one device: it has the weights twice and exchanges whole gradients
    after the last backward. Blocks that live in host memory stream in as `fully_shard` gathers, at level 0 over one device.
    """
    if stages > 1:
        return ONCE if sharding > 0 or offload == FULL_OFFLOAD or copies > 1 else WHOLE
    return EACH_PASS if sharding == 0 and offload == FULL_OFFLOAD else sharding


def beside_s(compute_s: float, tensor_s: float, waits_s: float, goes_on_s: float) -> float:
    """Seconds of a pass of a block while its neighbours' parameters and gradients move.

    Args:
        compute_s: Ops.
        tensor_s: Collectives inside the block, which block its ops.
        waits_s: Communication that the next block waits for.
        goes_on_s: Communication that may outlast the block.
    """
    slowed_s = compute_s + tensor_s + SLOWDOWN * min(compute_s, waits_s + goes_on_s)
    return max(slowed_s, waits_s)


def hidden_buckets(gradient_bytes: float) -> float:
    """Full buckets of 25 MiB that are not the last one, when so many bytes fill a first bucket of 1 MiB, then these."""
    rest = gradient_bytes - FIRST_BUCKET
    if rest <= 0.0:
        return 0.0
    full = rest // BUCKET
    return full if rest > full * BUCKET else full - 1.0
