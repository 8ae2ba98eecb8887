"""Blocks of a captured step as `rlplace.strategy.layouts.cut_block` searches them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlplace.model.graph.opgraph import BUFFER
from rlplace.strategy.layouts.cut_block import Block
from rlplace.strategy.layouts.cut_moves import FEATURE, ROW, SAMPLE, WHOLE, CutOp, CutValue
from rlplace.strategy.layouts.forward_ops import TABLE, ForwardOps


@dataclass(frozen=True, eq=False)
class FoundBlock:
    """A block and where it stands.

    Attributes:
        ops: Forward ops, in the order of `block.ops`.
        tensors: Tensors, in the order of `block.values`.
        block: What is searched.
    """

    ops: tuple[int, ...]
    tensors: tuple[int, ...]
    block: Block


def found_blocks(ops: ForwardOps, *, sequence_parallel: bool) -> list[FoundBlock]:
    """The blocks of a step.

    Args:
        ops: Its forward ops.
        sequence_parallel: Whether activations may be cut along the sequence.
    """
    of_block: dict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero(ops.searched).tolist():
        of_block[int(ops.block_of_op[op])].append(op)
    return [_Finder(ops, number, sequence_parallel).found(of_block[number]) for number in sorted(of_block)]


@dataclass(frozen=True, eq=False)
class _Finder:
    forward: ForwardOps
    number: int
    sequence_parallel: bool

    def found(self, ops: list[int]) -> FoundBlock:
        """The block of these ops."""
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
        return FoundBlock(tuple(ops), tuple(local), Block(cut, tuple(values)))

    def _place(self, op: int, tensor: int) -> tuple[object, ...]:
        """Order of what an op reads, equal in equal blocks wherever the tensors come from."""
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
            stream = self.sequence_parallel and gradient and runs.count(ROW) == 1 and FEATURE in runs
            border = runs.index(ROW) if stream else WHOLE
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
        """What may be cut: features, of weights or along everything that is made; without products and weights rows, too."""
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
                allowed = along and (runs == FEATURE or (runs == ROW and self.sequence_parallel and not forward.product[op]))
            if allowed:
                found.append((name, size))
        return tuple(found)

    def _table_work(self, op: int) -> float:
        """Bytes of a table; 0 where it is not looked up by samples or is no larger than what one sample looks up."""
        forward, size_bytes = self.forward, self.forward.graph.tensor_bytes
        table = float(sum(size_bytes[tensor] for tensor in forward.weights(op)))
        made = float(sum(size_bytes[tensor] for tensor in forward.makes[op])) / forward.graph.samples
        dims = forward.indices.dims.get(op, {})
        by_sample = forward.graph.samples == 1 or any(forward.runs(op, name) == SAMPLE for name in dims)
        return table if by_sample and table > made else 0.0
