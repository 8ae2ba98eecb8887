"""The cut of one block over a tensor group: PaSE's dynamic program over the ops and tensors of the block.

Vertices are the block's ops and tensors. An op is whole (every device does all of it) or one of its dimensions is cut into
`degree` parts. A tensor is whole or cut along one axis; a weighted product may read a gathered copy of a sequence-sharded
tensor, or a copy whose gradients are partial sums until an all-reduce. Edges cost the collectives, forward and backward
(`rlplace.strategy.layouts.cut_moves`).

Departures from the paper: the degree is given, and every device of the group holds what is whole, so that reading a part of it
needs no message. The work and the weights that stay whole come first, whatever a link costs; words that travel or stay decide
among what remains. The answer is thus the same for every batch and cluster, and the search over degrees asks whether it pays.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from rlplace.model.graph.indices import Names
from rlplace.model.graph.opgraph import BUFFER
from rlplace.strategy.layouts.cut_moves import (
    FEATURE,
    ROW,
    SAMPLE,
    SUMMED,
    WHOLE,
    CutOp,
    CutValue,
    Moves,
    copied,
    eliminate,
    enter,
    made,
    read,
    sent,
)
from rlplace.strategy.layouts.forward_ops import TABLE, ForwardOps

_PRODUCT_OVER_WORDS = 1e4
"""Cost of the smallest product over that of all words of the block."""


@dataclass(frozen=True)
class CutBlock:
    """A block to cut; equal blocks compare equal."""

    ops: tuple[CutOp, ...]
    values: tuple[CutValue, ...]
    along_sequence: bool = False  # activations may be cut along the sequence
    # heads of keys and values, and how many query heads share each: a larger degree, their multiple, repeats them
    grouped: tuple[tuple[int, int], ...] = ()

    def fits(self, size: int, degree: int) -> bool:
        """Returns whether a dimension of that size may be cut by a degree."""
        return size % degree == 0 or any(size == k and degree % k == 0 == k * g % degree for k, g in self.grouped)

    def parts(self, value: CutValue, axis: int, degree: int) -> int:
        """Returns into how many unlike parts a cut along an axis takes a value."""
        inner = [size for _, size in value.axes[axis + 1 : axis + 2]]
        size = value.axes[axis][1]
        return degree if size % degree == 0 or any((size, one) in self.grouped for one in inner) else size


@dataclass(frozen=True)
class BlockCut:
    """The cut of a block.

    Attributes:
        dims: By op the dimension that is cut, "" for none.
        layouts: By value `WHOLE` or an axis.
        moves: (value, pass, kind) of every collective, each once.
    """

    dims: Names
    layouts: tuple[int, ...]
    moves: tuple[tuple[int, int, int], ...]


def cut_block(block: CutBlock, degree: int, *, any_size: bool = False) -> BlockCut | None:
    """Returns the cut of least cost; None where no layout agrees with the borders.

    Args:
        block: The block.
        degree: Devices of the tensor group.
        any_size: Whether sizes that the degree does not divide may be cut, too.
    """
    ops, values, divisor = block.ops, block.values, 1 if any_size else degree
    fits = partial(block.fits, degree=divisor)
    states: list[Sequence[Any]] = [("", *(name for name, size in op.dims if fits(size))) for op in ops]
    states += [_layouts(value, fits, block.along_sequence) for value in values]
    states += [_copies(value, fits) for value in values]
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


def _answer(block: CutBlock, chosen: Sequence[Any]) -> BlockCut:
    ops, values = len(block.ops), block.values
    layouts = tuple(chosen[ops : ops + len(values)])
    moves = {(number, *move) for number, value in enumerate(values) for move in enter(value, layouts[number]) or ()}
    for first, second, value, between in _links(block):
        if not value.weight:  # gradients of whole weights that are partial sums meet once a step
            moves |= {((second - ops) % len(values), *move) for move in between(chosen[first], chosen[second]) or ()}
    return BlockCut(tuple(chosen[:ops]), layouts, tuple(sorted(moves)))


def _layouts(value: CutValue, fits: Callable[[int], bool], along_sequence: bool) -> list[int]:
    """Returns layouts that a tensor may have."""
    rows = along_sequence and value.gradient and not value.weight and sum(runs == ROW for runs, _ in value.axes) == 1
    allowed = (FEATURE, ROW) if rows else (FEATURE,)
    axes = [axis for axis, (runs, size) in enumerate(value.axes) if fits(size) and runs in allowed]
    if value.border is None or value.weight:
        return [WHOLE, *axes]
    if value.border == WHOLE:
        entered = [axis for axis in range(len(value.axes)) if value.axes[axis][0] == ROW] if rows and not value.made else []
        return [axis for axis in axes if axis in entered] if entered else [WHOLE]
    return ([] if value.made else [WHOLE]) + [axis for axis in axes if axis == value.border]


def _copies(value: CutValue, fits: Callable[[int], bool]) -> list[int]:
    """Layouts in which products with weights may read an activation."""
    features = [axis for axis, (runs, size) in enumerate(value.axes) if fits(size) and runs == FEATURE]
    return [WHOLE, *([SUMMED] if value.gradient else []), *features]


_Link = tuple[int, int, CutValue, Callable[[Any, Any], "Moves | None"]]


def _links(block: CutBlock) -> Iterator[_Link]:
    """Yields vertices, value and moves between their layouts: of ops with outputs and inputs, of tensors with copies."""
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


@dataclass(frozen=True, eq=False)
class FoundBlock:
    """A block with its ops and tensors in the graph."""

    ops: tuple[int, ...]  # forward ops, in the order of `block.ops`
    tensors: tuple[int, ...]  # in the order of `block.values`
    block: CutBlock


def found_blocks(ops: ForwardOps, *, sequence_parallel: bool) -> list[FoundBlock]:
    """Returns the blocks of a step, from its forward ops; `sequence_parallel`: activations may be cut along the sequence.

    Then the modules of blocks with two products that may be cut work on parts: they slice the whole activations that other
    modules (embeddings, say) make, and other modules (norms after the last block, heads) gather theirs.
    """
    parts = frozenset[int]()
    if sequence_parallel:
        ops, parts = _along_sequence(ops)
    of_block = _by_block(ops)
    return [_Finder(ops, number, parts).found(of_block[number]) for number in sorted(of_block)]


def _by_block(ops: ForwardOps) -> dict[int, list[int]]:
    of_block: dict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero(ops.searched).tolist():
        of_block[int(ops.block_of_op[op])].append(op)
    return of_block


def _along_sequence(ops: ForwardOps) -> tuple[ForwardOps, frozenset[int]]:
    """Returns the ops in finer blocks, and those blocks that work on parts of the sequence.

    Ops of a block that run outside of the module around its products, such as sums of embeddings, are a block of their own.
    """
    finer, parts = copy.copy(ops), set[int]()
    finer.block_of_op = ops.block_of_op.copy()
    for number, own in _by_block(ops).items():
        products = [op for op in own if ops.product[op] and ops.weights(op) and ops.may_cut(op)]
        if len(products) > 1:
            parts.add(number)
            paths = {op: ops.graph.op_module[op].split(".") for op in own}
            depth = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*(paths[op] for op in products), strict=False))))
            outside = [op for op in own if paths[op][:depth] != paths[products[0]][:depth]]
            finer.block_of_op[outside] = int(finer.block_of_op.max()) + 1
    return finer, frozenset(parts)


@dataclass(frozen=True, eq=False)
class _Finder:
    forward: ForwardOps
    number: int
    parts: frozenset[int]  # blocks that work on parts of the sequence

    def found(self, ops: list[int]) -> FoundBlock:
        """Returns the block of these ops."""
        forward = self.forward
        local: dict[int, int] = {}
        for op in ops:
            for tensor in (*sorted(forward.reads[op], key=partial(self._place, op)), *forward.makes[op]):
                local.setdefault(tensor, len(local))
        values = [self._value(tensor) for tensor in local]
        ends: dict[int, bool] = {}
        for op in reversed(ops):
            ends[op] = all(ends.get(reader, False) and not forward.product[reader] for reader in forward.after[op])
        cut = tuple(self._op(op, local, ends[op]) for op in ops)
        grouped = tuple(sorted({pair for op, record in zip(ops, cut, strict=True) for pair in self._grouped(op, record)}))
        return FoundBlock(tuple(ops), tuple(local), CutBlock(cut, tuple(values), self.number in self.parts, grouped))

    def _grouped(self, op: int, record: CutOp) -> Iterator[tuple[int, int]]:
        """Yields heads of keys and values, and the query heads of each, of attention on groups or of a copy for each."""
        forward = self.forward
        if forward.graph.op_kind[op] != "attention" and (len(record.reads) != 1 or record.weighted):
            return
        sizes = forward.indices.dims.get(op, {})
        for _, output in record.makes:
            for outer, inner in pairwise(output):
                alike = outer and inner and forward.runs(op, outer) == forward.runs(op, inner) == FEATURE
                if alike and any(outer in names and inner not in names for _, names in record.reads):
                    yield sizes[outer], sizes[inner]

    def _place(self, op: int, tensor: int) -> tuple[object, ...]:
        """Returns the sort key of an input of an op, equal in equal blocks wherever the tensors come from."""
        graph, forward = self.forward.graph, self.forward
        outside = forward.block_of_op[graph.tensor_producer[tensor]] != self.number
        return int(graph.tensor_role[tensor]), bool(outside), forward.names(op, tensor) or (), tensor

    def _value(self, tensor: int) -> CutValue:
        forward, graph = self.forward, self.forward.graph
        maker, readers = int(graph.tensor_producer[tensor]), forward.readers[tensor]
        weight = tensor in forward.parameters or graph.tensor_role[tensor] == BUFFER
        gradient = bool(forward.with_gradient[maker]) if maker >= 0 else forward.is_trained(tensor)
        elsewhere = any(forward.block_of_op[op] != self.number for op in ([maker, *readers] if maker >= 0 else readers))
        sizes = forward.indices.axes.get(tensor, ())
        runs = [forward.runs_along(tensor, axis) for axis in range(len(sizes))]
        if weight and elsewhere:  # a buffer that several blocks read stays whole
            runs = [ROW] * len(sizes)
        border = None
        if not weight and (elsewhere or maker < 0):
            stream = maker >= 0 and int(forward.block_of_op[maker]) in self.parts and gradient
            border = runs.index(ROW) if stream and runs.count(ROW) == 1 and FEATURE in runs else WHOLE
        made = maker >= 0 and forward.block_of_op[maker] == self.number
        return CutValue(
            tuple(zip(runs, sizes, strict=True)), int(graph.tensor_bytes[tensor]), bool(weight), gradient, bool(made), border
        )

    def _op(self, op: int, local: dict[int, int], ends: bool) -> CutOp:
        forward = self.forward
        reads = [(tensor, forward.names(op, tensor)) for tensor in forward.reads[op]]
        makes = [(tensor, forward.names(op, tensor)) for tensor in forward.makes[op] if forward.readers[tensor]]
        known = all(names is not None for _, names in (*reads, *makes))
        work = float(forward.graph.op_flops[op]) if forward.product[op] else self._table_work(op)
        outputs = {name for tensor in forward.makes[op] for name in forward.names(op, tensor) or () if name}
        return CutOp(
            work,
            bool(forward.weights(op)),
            self._dims(op) if known and forward.may_cut(op) and (work > 0 or not forward.weights(op)) else (),
            frozenset(outputs) if forward.with_gradient[op] else frozenset(),
            tuple((local[tensor], names or ()) for tensor, names in reads),
            tuple((local[tensor], names or ()) for tensor, names in makes),
            ends,
        )

    def _dims(self, op: int) -> tuple[tuple[str, int], ...]:
        """Returns dimensions that may be cut: features of weights or of all outputs; without products and weights rows, too."""
        forward = self.forward
        weights = [forward.names(op, tensor) or () for tensor in forward.weights(op)]
        outputs = [names for tensor in forward.makes[op] if (names := forward.names(op, tensor))]
        table = forward.graph.op_kind[op] == TABLE
        found = []
        for name, size in forward.indices.dims.get(op, {}).items():
            runs, along = forward.runs(op, name), all(name in names for names in outputs)
            if any(name not in names for names, _ in forward.indices.statistics.get(op, ())):
                continue
            if weights:
                allowed = runs == FEATURE and any(name in names for names in weights) and not (along and table)
            else:
                allowed = along and (runs == FEATURE or (runs == ROW and self.number in self.parts and not forward.product[op]))
            if allowed:
                found.append((name, size))
        return tuple(found)

    def _table_work(self, op: int) -> float:
        """Returns bytes of a table; 0 where it is not looked up by samples or is no larger than what one sample looks up."""
        forward, size_bytes = self.forward, self.forward.graph.tensor_bytes
        table = float(sum(size_bytes[tensor] for tensor in forward.weights(op)))
        made = float(sum(size_bytes[tensor] for tensor in forward.makes[op])) / forward.graph.samples
        dims = forward.indices.dims.get(op, {})
        by_sample = forward.graph.samples == 1 or any(forward.runs(op, name) == SAMPLE for name in dims)
        return table if by_sample and table > made else 0.0
