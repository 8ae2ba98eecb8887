"""A step in which one block of each kind represents all that are like it, so that layouts are searched in a few blocks.

Blocks that have the same ops, read and write alike and share no parameter with others are alike. In the folded step whatever
reads a tensor of a block that was left out reads that of the block that represents it, and whatever forward ops read in the
step is read; the numbers of tensors stay.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.model.graph.indices import Indices, Traced
from rlplace.model.graph.opgraph import FORWARD, OpGraph
from rlplace.records import trusted
from rlplace.strategy.blocks.rows import graph_of_rows, rows_of_blocks
from rlplace.strategy.layouts.forward_ops import NOT_TRACED
from rlplace.strategy.layouts.tensor_layout import LayoutCollective, TensorLayout

Ints = NDArray[np.int64]
T = TypeVar("T")


class Folded(NamedTuple):
    """A folded step.

    Attributes:
        graph: The ops that are left, n of N, and all tensors.
        whole: The step itself.
        of_op: int [N], block of every op of the step.
        ops: int64 [n], their numbers in the step.
        row: int64 [N], which of them represents each op.
        tensor: int64 [T], the tensor that represents each.
        inputs: For each op of the step that reads tensors, those in the order of the op that represents it.
    """

    graph: OpGraph
    whole: OpGraph
    of_op: NDArray[Any]
    ops: Ints
    row: Ints
    tensor: Ints
    inputs: dict[int, list[int]]

    def unfold(self, layout: TensorLayout) -> TensorLayout:
        """Returns the layout of the step from that of the folded one."""
        graph, row = self.whole, self.row.tolist()
        stands = np.arange(len(graph.parameters))
        held = np.flatnonzero((graph.tensor_parameter >= 0) & (graph.tensor_producer < 0))
        stands[graph.tensor_parameter[held]] = graph.tensor_parameter[self.tensor[held]]
        members: dict[int, list[int]] = defaultdict(list)
        for op, number in enumerate(row):
            members[number].append(op)
        paths: dict[str, dict[str, None]] = defaultdict(dict)
        for op, number in enumerate(row):
            paths[graph.op_module[self.ops[number]]][graph.op_module[op]] = None
        for parameter, other in zip(graph.parameters, stands.tolist(), strict=True):
            first = graph.parameters[other]
            for one, own in zip((first.name, *first.aliases), (parameter.name, *parameter.aliases), strict=False):
                paths[one.rpartition(".")[0]][own.rpartition(".")[0]] = None
        return TensorLayout(
            layout.degree,
            layout.op_parts[self.row],
            {op: layout.op_dims[number] for op, number in enumerate(row) if number in layout.op_dims},
            layout.tensor_parts[self.tensor],
            layout.parameter_parts[stands],
            tuple(self._of(item, op) for item in layout.collectives for op in members[item.op]),
            {path: word for first, word in layout.modules.items() for path in paths[first]},
            np.flatnonzero(np.isin(self.row, layout.thin_ops)),
        )

    def _of(self, item: LayoutCollective, op: int) -> LayoutCollective:
        """Returns a collective of an op that an op of the folded step represents."""
        graph, first = self.whole, int(self.ops[item.op])
        made = np.flatnonzero(graph.tensor_producer == op)
        own = made[self.tensor[made] == item.tensor].tolist()
        if not own:
            theirs = self.inputs.get(first) or graph.edge_tensor[graph.consumers == first].tolist()
            at = self.tensor[theirs].tolist().index(item.tensor)
            own = [self.inputs[op][at] if op != first else theirs[at]]
        return dataclasses.replace(item, block=int(self.of_op[op]), op=op, tensor=own[0])


def fold(graph: OpGraph, of_op: NDArray[Any], first: Ints) -> Folded:
    """Folds a step.

    Args:
        graph: Captured in this process.
        of_op: int [N], block of every op.
        first: int64 [B], the first block that has the same ops as each, in the same order.

    Raises:
        InputError: The graph does not say how its ops access tensors.
    """
    if graph.traced is None:
        raise InputError(NOT_TRACED)
    first, number = _refined(graph, of_op, first), np.full(graph.num_ops, -1, dtype=np.int64)
    while True:
        ops, row = rows_of_blocks(of_op, first)
        tensor, inputs, alone = _matched(graph, of_op, ops[row])
        number[:] = -1
        number[ops] = np.arange(len(ops))
        reader, read = number[graph.consumers], tensor[graph.edge_tensor]
        edges = np.unique(np.stack([read, reader], axis=1)[reader >= 0], axis=0)
        maker = np.where(graph.tensor_producer >= 0, graph.tensor_producer, 0)[graph.edge_tensor]
        kept = (graph.tensor_producer >= 0)[graph.edge_tensor] & (number[maker] >= 0)
        ahead = (graph.op_phase[maker] == FORWARD) & (graph.op_phase[graph.consumers] == FORWARD)
        unread = kept & ahead & ~np.isin(graph.edge_tensor, edges[:, 0])
        alone |= set(of_op[graph.consumers[unread]].tolist())
        if not alone:
            break
        first[sorted(alone)] = sorted(alone)
    indices = graph.traced.indices
    access: dict[int, dict[int, Any]] = {}
    for at, names in indices.access.items():
        for op, own in names.items():
            if number[op] >= 0:
                access.setdefault(int(tensor[at]), {})[int(number[op])] = own
    traced = Traced(_renumbered(graph.traced.accesses, number), graph.traced.rows, {})
    dims, statistics = _renumbered(indices.dims, number), _renumbered(indices.statistics, number)
    traced.__dict__["indices"] = Indices(dims, indices.axes, access, statistics)
    with trusted():
        folded = dataclasses.replace(
            graph_of_rows(graph, ops),
            consumers=edges[:, 1].astype(np.int32),
            consumer_ptr=np.searchsorted(edges[:, 0], np.arange(graph.num_tensors + 1)),
            traced=traced,
        )
    return Folded(folded, graph, of_op, ops, row, tensor, inputs)


def _renumbered(known: Mapping[int, T], number: Ints) -> dict[int, T]:
    """Returns what is known of the ops that are left, by their numbers in the folded step."""
    return {int(number[op]): own for op, own in known.items() if number[op] >= 0}


def _refined(graph: OpGraph, of_op: NDArray[Any], first: Ints) -> Ints:
    """Returns the first of the blocks that also read the tensors of like blocks, and whose tensors like blocks read."""
    maker = graph.tensor_producer[graph.edge_tensor]
    inner = maker >= 0
    made, read, phase = of_op[maker[inner]], of_op[graph.consumers[inner]], graph.op_phase[maker[inner]]
    ways: list[set[tuple[int, int, int]]] = [set() for _ in first]
    for one, other, when in np.unique(np.stack([made, read, phase], axis=1)[made != read], axis=0).tolist():
        ways[other].add((0, when, int(first[one])))
        ways[one].add((1, when, int(first[other])))
    known: dict[object, int] = {}
    return np.array([known.setdefault((own, frozenset(ways[b])), b) for b, own in enumerate(first.tolist())], dtype=np.int64)


def _matched(graph: OpGraph, of_op: NDArray[Any], stands: Ints) -> tuple[Ints, dict[int, list[int]], set[int]]:
    """Returns which tensor represents each, the inputs of ops in the same order, and blocks that are not alike after all."""
    assert graph.traced is not None
    indices, unlike = graph.traced.indices, set[int]()
    maker, size, block, of = graph.tensor_producer.tolist(), graph.tensor_bytes.tolist(), of_op.tolist(), stands.tolist()
    tensor = list(range(graph.num_tensors))
    made: dict[int, list[int]] = defaultdict(list)
    for at, op in enumerate(maker):
        if op >= 0:
            made[op].append(at)
    left_out = [op for op, other in enumerate(of) if op != other]
    for op in left_out:
        own, others = made[op], made[of[op]]
        if len(own) == len(others):
            for at, to in zip(own, others, strict=True):
                tensor[at] = to
        else:
            unlike.add(block[op])
    reads = np.unique(np.stack([graph.edge_tensor, of_op[graph.consumers]], axis=1), axis=0)[:, 0]
    shared = (np.bincount(reads, minlength=graph.num_tensors) > 1).tolist()

    def sort(op: int, at: int) -> int:
        """Returns 0 and 1 for what no op makes, of one block or of several, 2 and 3 for what the own and other blocks make."""
        return int(shared[at]) if maker[at] < 0 else 2 + (block[maker[at]] != block[op])

    read: dict[int, list[int]] = defaultdict(list)
    for at, op in zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True):
        read[op].append(at)
    inputs: dict[int, list[int]] = {}
    sorts: dict[int, list[int]] = {}
    for op in dict.fromkeys((*map(of.__getitem__, left_out), *left_out)):
        kinds = [(sort(op, at), at) for at in read[op]]
        keyed = sorted((kind, tensor[at] if kind == 2 else size[at], at) for kind, at in kinds)
        inputs[op], sorts[op] = [at for _, _, at in keyed], [kind for kind, _, _ in keyed]
    for op in left_out:
        other, own, theirs = of[op], inputs[op], inputs[of[op]]
        alike = len(own) == len(theirs) and indices.dims.get(op) == indices.dims.get(other)
        for at, to, kind, like in zip(own, theirs, sorts[op], sorts[other], strict=False):
            if kind == 0:
                alike &= tensor[at] in (at, to)
                tensor[at] = to
            alike &= kind == like and size[at] == size[to] and (kind in (0, 3) or tensor[at] == to)
        for at, to in zip((*own, *made[op]), (*theirs, *made[other]), strict=False):
            alike &= indices.access.get(at, {}).get(op) == indices.access.get(to, {}).get(other)
        if not alike:
            unlike.add(block[op])
    return np.array(tensor, dtype=np.int64), inputs, unlike
