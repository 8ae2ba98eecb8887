"""Collectives between unlike layouts of the ops and tensors of a block over a tensor group, and PaSE's elimination.

Collectives stand where torch's parallel modules can put them: before and after modules that multiply by a weight. Nothing whole
is sliced inside a block, and what a product makes is gathered only where no other product comes after it (logits); along the
sequence, between products, everything may be gathered and scattered.

PaSE's dynamic program finds the options of vertices with the least sum of costs, eliminating one vertex after the other.
Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021 (arXiv 2407.04001). All costs are tables over
the options of one or two vertices. Eliminating vertex v adds up all tables that mention v, takes the minimum over v's options
for every combination of its neighbours, remembers the arg-min, and puts the result back as one table; the neighbours become
neighbours of each other. The vertex with fewest neighbours goes next (the lower index on ties). When no vertex is left, the
arg-mins are read backwards. Sums of the tables of a block are small; `benchmarks.papers.pase`
searches the paper's networks with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.indices import Names
from rlplace.strategy.costs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BACKWARD_PASS, FORWARD_PASS, REDUCE_SCATTER

SAMPLE, ROW, FEATURE = range(3)
"""Contents of an axis: samples, which the data axes of a mesh own; other rows of products (the sequence); the rest."""

WHOLE, SUMMED, PARTIAL = -1, -2, -3
"""Layouts next to axis numbers: whole; whole, the gradients to be summed; to be summed itself."""


Moves = tuple[tuple[int, int], ...]
"""(pass, kind) of collectives."""


@dataclass(frozen=True)
class CutOp:
    """A forward op of a block.

    Attributes:
        work: FLOPs, for a table its bytes; 0 for other ops.
        weighted: Whether it multiplies by a weight or looks rows of one up.
        dims: Dimensions that may be cut, and their sizes.
        outputs: Dimensions of its outputs, where it has gradients.
        reads: Values and names of their axes; so is `makes`.
        makes: See `reads`.
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
    """Returns moves between other blocks and an activation that they make."""
    if value.made or value.weight:
        return ()
    return _moves(value, WHOLE if value.border is None else value.border, state)


def made(op: CutOp, value: CutValue, names: Names, dim: str, state: int) -> Moves | None:
    """Returns moves between an op that makes an activation and the activation; None where they do not agree."""
    source = names.index(dim) if dim in names and dim else PARTIAL if dim else WHOLE
    if source >= 0 and state != source and not (state == WHOLE and op.weighted and op.ends):
        return None
    if source == PARTIAL and state >= 0 and value.axes[state][0] == FEATURE:
        return None
    if source == WHOLE and state >= 0 and state != value.border:  # nothing is sliced but where a block ends
        return None
    return _moves(value, source, state)


def copied(value: CutValue, state: int, copy: int) -> Moves | None:
    """Returns moves between a tensor and the copy that products with weights read; None where they do not agree."""
    if copy >= 0 or (state >= 0 and value.axes[state][0] == FEATURE):
        return () if copy == state else None
    return _moves(value, state, copy)


def read(op: CutOp, value: CutValue, names: Names, dim: str, state: int) -> Moves | None:
    """Returns moves between a weight or activation and an op that reads it; None where they do not agree."""
    need = names.index(dim) if dim in names and dim else WHOLE
    summed = need == WHOLE and dim in op.outputs and value.gradient
    if value.weight:
        return None if need != state else ((BACKWARD_PASS, ALL_REDUCE),) if summed else ()
    return () if state == (SUMMED if summed else need) or (state == SUMMED and need == WHOLE) else None


def _moves(value: CutValue, source: int, state: int) -> Moves:
    """Returns collectives from the layout `source` to another, and of the gradients back."""
    moves = [(FORWARD_PASS, _collective(source, max(state, WHOLE)))]
    if value.gradient:
        moves.append((BACKWARD_PASS, _collective(PARTIAL if state == SUMMED else state, max(source, WHOLE))))
    return tuple((when, kind) for when, kind in moves if kind is not None)


def _collective(source: int, target: int) -> int | None:
    """Returns kind that brings one layout into another; None where each device has what it needs."""
    if source in (target, WHOLE):
        return None
    if source == PARTIAL:
        return ALL_REDUCE if target == WHOLE else REDUCE_SCATTER
    return ALL_GATHER if target == WHOLE else ALL_TO_ALL


def sent(kind: int, degree: int) -> float:
    """Returns the part of a whole tensor that a device sends in a collective."""
    share = (degree - 1) / degree
    return 2 * share if kind == ALL_REDUCE else share / degree if kind == ALL_TO_ALL else share


Floats = NDArray[np.float64]


class OptionTable(NamedTuple):
    """A cost for every combination of some vertices' options: an axis a vertex."""

    scope: tuple[int, ...]
    values: Floats


def eliminate(own: Sequence[Floats], ends: Sequence[tuple[int, int]], between: Sequence[Floats]) -> NDArray[np.intp]:
    """Returns the best option of every vertex, by index.

    Args:
        own: Per vertex the costs of its options.
        ends: The two vertices of every edge; parallel edges are allowed and all count.
        between: Per edge its costs, options of its first vertex by those of its second.
    """
    near: list[set[int]] = [set() for _ in own]
    tables = [[OptionTable((vertex,), cost)] for vertex, cost in enumerate(own)]  # those that mention each vertex
    for edge, cost in zip(ends, between, strict=True):
        for vertex, other in (edge, edge[::-1]):
            near[vertex].add(other)
            tables[vertex].append(OptionTable(edge, cost))
    heap = [(len(around), vertex) for vertex, around in enumerate(near)]
    heapify(heap)
    arg_mins: dict[int, tuple[tuple[int, ...], NDArray[np.intp]]] = {}
    while heap:
        degree, vertex = heappop(heap)
        if vertex in arg_mins or degree != len(near[vertex]):  # an entry from before the degree changed
            continue
        around = sorted(near[vertex])
        table, arg_min = _minimum(tables[vertex], vertex, around)
        arg_mins[vertex] = table.scope, arg_min
        for other in around:
            near[other] = (near[other] | near[vertex]) - {vertex, other}
            tables[other] = [*(one for one in tables[other] if vertex not in one.scope), table]
            heappush(heap, (len(near[other]), other))
    chosen = np.zeros(len(own), dtype=np.intp)
    for vertex, (scope, arg_min) in reversed(arg_mins.items()):
        chosen[vertex] = arg_min[tuple(chosen[other] for other in scope)]
    return chosen


def _minimum(tables: list[OptionTable], vertex: int, around: list[int]) -> tuple[OptionTable, NDArray[np.intp]]:
    """Returns the minimum of a sum of tables over one vertex's options, by options of its neighbours, and where it is."""
    if not around:
        total = _sum(tables, (vertex,))
        return OptionTable((), np.array(total.min())), np.array(total.argmin())
    counts = {axis: size for table in tables for axis, size in zip(table.scope, table.values.shape, strict=True)}
    mentions = {axis: {other for table in tables if axis in table.scope for other in table.scope} for axis in around}
    # The neighbour whose tables are smallest together is added last.
    column = min(around, key=lambda axis: (prod(counts[other] for other in mentions[axis]), -counts[axis]))
    rest = tuple(axis for axis in around if axis != column)
    left = _sum([table for table in tables if column not in table.scope], (*rest, vertex))
    right = _sum([table for table in tables if column in table.scope], (*rest, vertex, column))
    total = left[..., None] + right
    return OptionTable((*rest, column), total.min(axis=-2)), total.argmin(axis=-2)


def _sum(tables: list[OptionTable], axes: tuple[int, ...]) -> Floats:
    """Returns sum of tables with one axis for each of `axes`, of length one where no table depends on it."""
    total = np.zeros((1,) * len(axes))
    for table in sorted(tables, key=lambda table: table.values.size):
        mine = [axis for axis in axes if axis in table.scope]
        values = table.values.transpose([table.scope.index(axis) for axis in mine])
        total = total + values.reshape([values.shape[mine.index(axis)] if axis in mine else 1 for axis in axes])
    return total
