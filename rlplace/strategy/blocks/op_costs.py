"""What a model costs op by op: what the op-level expansion of a strategy knows, beside the costs of its blocks.

Axes: N forward and backward ops, T tensors. Updates are those of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.strategy.costs import BlockCosts, Bytes, Cut, Floats


@dataclass(frozen=True, eq=False)
class StepOps:
    """The ops of a pass and who reads what; sizes and times are in `PassOps`.

    Attributes:
        names: N.
        phase: int8 [N], index into `rlplace.problem.problem.PHASES`.
        block: int32 [N], ascending op numbers are the order in which a block runs them.
        producer: int64 [T], the op that makes a tensor, -1 for inputs of the model.
        input_block: int64 [T], the block that reads an input of the model first, -1 for other tensors.
        is_gradient: bool [T], gradients of weights.
        tensor: int64 [E], tensors that ops read.
        reader: int64 [E], the ops; views that keep no storage alive are left out.
        again: bool [R, N], forward ops that run again in the backward of their block, by choice of recomputation.
        cached: bool [R, N], ops whose outputs are kept until their block runs again.
        retained: bool [N], backward ops whose part of the autograd graph the first half of a split backward leaves: it detaches
            the outputs, so that what comes after the last weight goes.
    """

    names: Sequence[str]
    phase: NDArray[np.int8]
    block: NDArray[np.int32]
    producer: NDArray[np.int64]
    input_block: NDArray[np.int64]
    is_gradient: NDArray[np.bool_]
    tensor: NDArray[np.int64]
    reader: NDArray[np.int64]
    again: NDArray[np.bool_]
    cached: NDArray[np.bool_]
    retained: NDArray[np.bool_]


class TensorCollective(NamedTuple):
    """A collective inside a block, of its tensor, context or expert group.

    Attributes:
        block: The block.
        when: Index of the pass (`FORWARD_PASS`, `BACKWARD_PASS`).
        kind: Index into `COLLECTIVE_KINDS`.
        size_bytes: Of the whole tensor.
        place: Where it stands among the forward ops of its block: behind op n at n + 0.5, before it at n - 0.5.
    """

    block: int
    when: int
    kind: int
    size_bytes: float
    place: float


@dataclass(frozen=True, eq=False)
class PassOps:
    """One pass on one device of a tensor group.

    Attributes:
        seconds: float64 [N].
        temporary_bytes: int64 [N].
        tensor_bytes: int64 [T].
        collectives: What the group sends.
    """

    seconds: Floats
    temporary_bytes: Bytes
    tensor_bytes: Bytes
    collectives: tuple[TensorCollective, ...]


class OpCosts(BlockCosts, Protocol):
    """Costs of blocks that are also known op by op."""

    def step_ops(self, split: bool) -> StepOps:
        """The ops of a pass; `split`: weight gradients are ops of their own."""
        ...

    def pass_ops(self, kind: int, cut: Cut, split: bool) -> PassOps:
        """What they take on a device of that kind.

        Raises:
            InputError: `why_not` has a reason.
        """
        ...


def slowest(passes: list[PassOps]) -> PassOps:
    """Every op as slow and every tensor as large as in the worst of some passes: of devices that wait for each other."""
    if len(passes) == 1:
        return passes[0]
    seconds, temporary, sizes = (
        np.max([getattr(item, name) for item in passes], axis=0) for name in ("seconds", "temporary_bytes", "tensor_bytes")
    )
    collectives = tuple(
        max(same, key=lambda item: item.size_bytes) for same in zip(*(p.collectives for p in passes), strict=True)
    )
    return PassOps(seconds, temporary, sizes, collectives)
