"""How one block is cut over a tensor group: PaSE's dynamic program over the ops and tensors of the block.

Vertices are the block's ops and tensors. An op is whole (every device does all of it) or one of its dimensions is cut into
`degree` parts. A tensor is whole or cut along one axis; what products with weights read of it may be another copy, which is
whole where the tensor is cut along the sequence, or whose gradients are partial sums until an all-reduce adds them. Edges cost
the collectives, forward and backward (`rlplace.strategy.layouts.cut_moves`).

Departures from the paper: the degree is given, and every device of the group holds what is whole, so that reading a part of it
needs no message. The work and the weights that stay whole come first, whatever a link costs; words that travel or stay decide
among what remains. The answer is thus the same for every batch and cluster, and the search over degrees asks whether it pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rlplace.model.graph.indices import Names
from rlplace.strategy.layouts.cut_moves import (
    FEATURE,
    ROW,
    SUMMED,
    WHOLE,
    CutOp,
    CutValue,
    Moves,
    copied,
    enter,
    made,
    read,
    sent,
)
from rlplace.strategy.layouts.elimination import eliminate

_PRODUCT_OVER_WORDS = 1e4
"""How much more the smallest product costs than all words of the block."""


@dataclass(frozen=True)
class Block:
    """What is searched; equal blocks compare equal."""

    ops: tuple[CutOp, ...]
    values: tuple[CutValue, ...]


@dataclass(frozen=True)
class BlockCut:
    """The answer.

    Attributes:
        dims: By op the dimension that is cut, "" for none.
        layouts: By value `WHOLE` or an axis.
        moves: (value, pass, kind) of every collective, each once.
    """

    dims: Names
    layouts: tuple[int, ...]
    moves: tuple[tuple[int, int, int], ...]


def cut_block(block: Block, degree: int, *, sequence_parallel: bool, any_size: bool = False) -> BlockCut | None:
    """The cut of least cost; None where no layout agrees with the borders.

    Args:
        block: The block.
        degree: Devices of the tensor group.
        sequence_parallel: Whether activations may be cut along the sequence.
        any_size: Whether sizes that the degree does not divide may be cut, too.
    """
    ops, values, divisor = block.ops, block.values, 1 if any_size else degree
    states: list[Sequence[Any]] = [("", *(name for name, size in op.dims if size % divisor == 0)) for op in ops]
    states += [_layouts(value, divisor, sequence_parallel) for value in values]
    states += [_copies(value, divisor) for value in values]
    if not all(states):
        return None
    least = min((op.work for op in ops if op.work > 0), default=1.0)
    price = least / _PRODUCT_OVER_WORDS / sum(value.words for value in values)

    def cost(moves: Moves | None, value: CutValue) -> float:
        return np.inf if moves is None else sum(price * (1 + sent(kind, degree) * value.words) for _, kind in moves)

    own = [np.array([op.work / (degree if dim else 1) for dim in options]) for op, options in zip(ops, states, strict=False)]
    own += [
        np.array(
            [cost(enter(value, state), value) + (0 if value.weight or state >= 0 else price * value.words) for state in options]
        )
        for value, options in zip(values, states[len(ops) :], strict=False)
    ]
    own += [np.zeros(len(options)) for options in states[len(own) :]]
    ends, tables = [], []
    for first, second, value, between in _links(block):
        ends.append((first, second))
        tables.append(np.array([[cost(between(one, other), value) for other in states[second]] for one in states[first]]))
    chosen = eliminate(own, ends, tables)
    return _answer(block, [options[index] for options, index in zip(states, chosen, strict=True)])


def _answer(block: Block, chosen: Sequence[Any]) -> BlockCut:
    ops, values = len(block.ops), block.values
    layouts = tuple(chosen[ops : ops + len(values)])
    moves = {(number, *move) for number, value in enumerate(values) for move in enter(value, layouts[number]) or ()}
    for first, second, value, between in _links(block):
        if not value.weight:  # gradients of whole weights that are partial sums meet once a step
            moves |= {((second - ops) % len(values), *move) for move in between(chosen[first], chosen[second]) or ()}
    return BlockCut(tuple(chosen[:ops]), layouts, tuple(sorted(moves)))


def _layouts(value: CutValue, divisor: int, sequence_parallel: bool) -> list[int]:
    """Layouts that a tensor may have."""
    rows = sequence_parallel and value.gradient and not value.weight and sum(runs == ROW for runs, _ in value.axes) == 1
    allowed = (FEATURE, ROW) if rows else (FEATURE,)
    axes = [axis for axis, (runs, size) in enumerate(value.axes) if size % divisor == 0 and runs in allowed]
    if value.border is None or value.weight:
        return [WHOLE, *axes]
    if value.border == WHOLE:
        return [WHOLE]
    return ([] if value.made else [WHOLE]) + [axis for axis in axes if axis == value.border]


def _copies(value: CutValue, divisor: int) -> list[int]:
    """Layouts in which products with weights may read an activation."""
    features = [axis for axis, (runs, size) in enumerate(value.axes) if size % divisor == 0 and runs == FEATURE]
    return [WHOLE, *([SUMMED] if value.gradient else []), *features]


_Link = tuple[int, int, CutValue, Callable[[Any, Any], "Moves | None"]]


def _links(block: Block) -> Iterator[_Link]:
    """(vertex, vertex, value, what moves between layouts of theirs): ops with what they make and read, tensors with copies."""
    ops, values = block.ops, block.values
    several = set()
    for index, op in enumerate(ops):
        for number, names in op.makes:
            yield index, len(ops) + number, values[number], partial(made, op, values[number], names)
        for number, names in op.reads:
            value = values[number]
            if op.weighted and not value.weight:
                several.add(number)
                yield index, len(ops) + len(values) + number, value, partial(read, op, value, names)
            else:
                yield index, len(ops) + number, value, partial(read, op, value, names)
    for number in sorted(several):
        yield len(ops) + number, len(ops) + len(values) + number, values[number], partial(copied, values[number])
