"""What moves where ops and tensors of a block have unlike layouts over a tensor group.

Collectives stand where torch's parallel modules can put them: before and after modules that multiply by a weight. Nothing whole
is sliced inside a block, and what a product makes is gathered only where no other product comes after it (logits); along the
sequence, between products, everything may be gathered and scattered.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.model.graph.indices import Names
from rlplace.strategy.costs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BACKWARD_PASS, FORWARD_PASS, REDUCE_SCATTER

SAMPLE, ROW, FEATURE = range(3)
"""What runs along an axis: samples, which the data axes of a mesh own; other rows of products (the sequence); the rest."""

WHOLE, SUMMED, PARTIAL = -1, -2, -3
"""Layouts next to axis numbers: whole; whole, the gradients to be summed; to be summed itself."""


Moves = tuple[tuple[int, int], ...]
"""(pass, kind) of collectives."""


@dataclass(frozen=True)
class CutOp:
    """A forward op of a block.

    Attributes:
        work: FLOPs, for a table its bytes; 0 for what is no product.
        weighted: Whether it multiplies by a weight or looks rows of one up.
        dims: Dimensions that may be cut, and their sizes.
        outputs: Dimensions along what it makes, where it has gradients.
        reads: Value and names of its axes.
        makes: Likewise.
        ends: Whether no product comes after it and it makes nothing for other blocks.
    """

    work: float
    weighted: bool
    dims: tuple[tuple[str, int], ...]
    outputs: frozenset[str]
    reads: tuple[tuple[int, Names], ...]
    makes: tuple[tuple[int, Names], ...]
    ends: bool


@dataclass(frozen=True)
class CutValue:
    """An activation, input or weight that a block touches.

    Attributes:
        axes: What runs along each axis, see `SAMPLE`, and its size.
        words: Bytes.
        weight: Whether it is a parameter or buffer.
        gradient: Whether it has one.
        made: Whether an op of the block makes it.
        border: Layout that other blocks have it in, None where no other block touches it.
    """

    axes: tuple[tuple[int, int], ...]
    words: int
    weight: bool
    gradient: bool
    made: bool
    border: int | None


def enter(value: CutValue, state: int) -> Moves:
    """What moves between other blocks and an activation that they make."""
    if value.made or value.weight:
        return ()
    return _moves(value, WHOLE if value.border is None else value.border, state)


def made(op: CutOp, value: CutValue, names: Names, dim: str, state: int) -> Moves | None:
    """What moves between an op that makes an activation and the activation."""
    source = names.index(dim) if dim in names and dim else PARTIAL if dim else WHOLE
    if source >= 0 and state != source and not (state == WHOLE and op.weighted and op.ends):
        return None
    if source == PARTIAL and state >= 0 and value.axes[state][0] == FEATURE:
        return None
    if source == WHOLE and state >= 0 and state != value.border:  # nothing is sliced but where a block ends
        return None
    return _moves(value, source, state)


def copied(value: CutValue, state: int, copy: int) -> Moves | None:
    """What moves between a tensor and what products with weights read of it."""
    if copy >= 0 or (state >= 0 and value.axes[state][0] == FEATURE):
        return () if copy == state else None
    return _moves(value, state, copy)


def read(op: CutOp, value: CutValue, names: Names, dim: str, state: int) -> Moves | None:
    """What moves between a weight or activation and an op that reads it."""
    need = names.index(dim) if dim in names and dim else WHOLE
    summed = need == WHOLE and dim in op.outputs and value.gradient
    if value.weight:
        return None if need != state else ((BACKWARD_PASS, ALL_REDUCE),) if summed else ()
    return () if state == (SUMMED if summed else need) or (state == SUMMED and need == WHOLE) else None


def _moves(value: CutValue, source: int, state: int) -> Moves:
    """Collectives that bring what has the layout `source` into another, and gradients back."""
    moves = [(FORWARD_PASS, _collective(source, max(state, WHOLE)))]
    if value.gradient:
        moves.append((BACKWARD_PASS, _collective(PARTIAL if state == SUMMED else state, max(source, WHOLE))))
    return tuple((when, kind) for when, kind in moves if kind is not None)


def _collective(source: int, target: int) -> int | None:
    """Kind that brings one layout into another; None where each device has what it needs."""
    if source in (target, WHOLE):
        return None
    if source == PARTIAL:
        return ALL_REDUCE if target == WHOLE else REDUCE_SCATTER
    return ALL_GATHER if target == WHOLE else ALL_TO_ALL


def sent(kind: int, degree: int) -> float:
    """Of a whole tensor, what a device sends in a collective."""
    share = (degree - 1) / degree
    return 2 * share if kind == ALL_REDUCE else share / degree if kind == ALL_TO_ALL else share
