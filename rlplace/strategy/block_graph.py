"""Blocks of a captured step as `rlplace.strategy.cut_block` searches them.

What runs along an axis is told from the graph: dimensions of ops and axes of tensors that run along each other form one class.
The class of the first axes of the inputs are samples; other dimensions of products with a weight that do not run along the
weight are rows (the sequence); what is left can be cut.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.graph.opgraph import BUFFER, FORWARD, INPUT, PARAMETER, OpGraph
from rlplace.problem.sharding import Names
from rlplace.strategy.cut_block import Block
from rlplace.strategy.cut_moves import FEATURE, ROW, SAMPLE, WHOLE, CutOp, CutValue

PRODUCTS = ("gemm", "bmm", "attention", "conv")
TABLE = "embedding"
"""Op kinds: those that multiply, and the one that looks rows of a weight up."""


@dataclass(frozen=True, eq=False)
class FoundBlock:
    """A block and where it stands.

    Attributes:
        number: The caller's, the first where several share a parameter.
        ops: Forward ops, in the order of `block.ops`.
        tensors: Tensors, in the order of `block.values`.
        block: What is searched.
    """

    number: int
    ops: tuple[int, ...]
    tensors: tuple[int, ...]
    block: Block


class BlockGraphs:
    """What is known about the forward ops of a captured step.

    Attributes:
        searched: bool [N], forward ops that do something.
        product: bool [N], those that multiply.
        readers: By tensor the searched ops that read it.
        with_gradient: bool [N], searched ops that gradients pass.
        makes: By op the tensors that it makes.
        reads: By searched op the tensors that it reads.
        views: By other forward op the tensors that it looks at.
    """

    def __init__(self, graph: OpGraph, block_of_op: NDArray[np.int32]) -> None:
        """Reads the graph.

        Args:
            graph: Captured in this process, by export or dispatch.
            block_of_op: int32 [N], block of every forward op; others are not looked at.

        Raises:
            InputError: The graph does not say how its ops access tensors.
        """
        if graph.traced is None:
            raise InputError(
                "tensor layouts: this graph does not say along which dimensions its ops can be cut; capture the model again in "
                "this process, and use the layout found there for graphs at other batch sizes"
            )
        self.graph, self.indices = graph, graph.traced.indices
        maker, everything = graph.tensor_producer, np.arange(graph.num_ops)
        kind = np.array(graph.op_kind)
        self.searched = (graph.op_phase == FORWARD) & ((kind != "view") | np.isin(everything, maker))
        self.product = self.searched & np.isin(kind, PRODUCTS)
        self.readers: list[list[int]] = [[] for _ in range(graph.num_tensors)]
        self.makes: dict[int, list[int]] = defaultdict(list)
        self.reads: dict[int, list[int]] = defaultdict(list)
        self.views: dict[int, list[int]] = defaultdict(list)
        for tensor in np.flatnonzero((graph.tensor_bytes > 0) & ((maker < 0) | self.searched[maker])).tolist():
            if maker[tensor] >= 0:
                self.makes[int(maker[tensor])].append(tensor)
            users = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
            self.readers[tensor] = [op for op in users[self.searched[users]].tolist() if op != maker[tensor]]
            for op in self.readers[tensor]:
                self.reads[op].append(tensor)
            for op in users[~self.searched[users] & (graph.op_phase[users] == FORWARD)].tolist():
                self.views[op].append(tensor)
        self.with_gradient = self._with_gradient()
        self.block_of_op = self._joined(block_of_op)
        self._runs = self._classes()

    def names(self, op: int, tensor: int) -> Names | None:
        """An op's dimensions along a tensor, None where that is not known."""
        return self.indices.access.get(tensor, {}).get(op)

    def weights(self, op: int) -> list[int]:
        """Parameters of two or more axes that an op multiplies by or looks rows up in."""
        if not (self.product[op] or self.graph.op_kind[op] == TABLE):
            return []
        return [tensor for tensor in self.reads[op] if self._is_weight(tensor)]

    def border_sizes(self, item: FoundBlock) -> list[int]:
        """Sizes of the axes along which other blocks have a block's activations cut."""
        values = zip(item.tensors, item.block.values, strict=True)
        return [self.indices.axes[tensor][value.border] for tensor, value in values if value.border not in (None, WHOLE)]

    def found(self, divisor: int, *, sequence_parallel: bool) -> list[FoundBlock]:
        """All blocks; only what `divisor` divides can be cut."""
        ops: dict[int, list[int]] = defaultdict(list)
        for op in np.flatnonzero(self.searched).tolist():
            ops[int(self.block_of_op[op])].append(op)
        return [self._found(number, ops[number], divisor, sequence_parallel) for number in sorted(ops)]

    def _is_weight(self, tensor: int) -> bool:
        graph = self.graph
        return graph.tensor_role[tensor] == PARAMETER and len(graph.parameters[graph.tensor_parameter[tensor]].shape) > 1

    def _with_gradient(self) -> NDArray[np.bool_]:
        """Ops between a parameter that is trained and an op that has work in the backward pass."""
        graph, order = self.graph, np.flatnonzero(self.searched).tolist()
        trained = {tensor for op in order for tensor in self.reads[op] if self._is_trained(tensor)}
        for op in order:
            if trained.intersection(self.reads[op]):
                trained.update(self.makes[op])
        passed = np.isin(np.arange(graph.num_ops), graph.op_forward[graph.op_phase != FORWARD])
        for op in reversed(order):
            passed[op] |= any(passed[reader] for tensor in self.makes[op] for reader in self.readers[tensor])
            passed[op] &= not trained.isdisjoint(self.reads[op])
        return passed

    def _is_trained(self, tensor: int) -> bool:
        return (
            self.graph.tensor_role[tensor] == PARAMETER and self.graph.parameters[self.graph.tensor_parameter[tensor]].trainable
        )

    def _joined(self, block_of_op: NDArray[np.int32]) -> NDArray[np.int32]:
        """Blocks that share a parameter as one."""
        blocks = block_of_op.copy()
        for tensor in np.flatnonzero(self.graph.tensor_role == PARAMETER).tolist():
            own = sorted({int(blocks[op]) for op in self.readers[tensor]})
            for other in own[1:]:
                blocks[blocks == other] = own[0]
        return blocks

    def _classes(self) -> dict[tuple[bool, int, str | int], int]:
        """`SAMPLE`, `ROW` or `FEATURE` for (True, op, dimension) and (False, tensor, axis)."""
        parent: dict[tuple[bool, int, str | int], tuple[bool, int, str | int]] = {}

        def root(node: tuple[bool, int, str | int]) -> tuple[bool, int, str | int]:
            while (above := parent.setdefault(node, node)) != node:
                parent[node] = parent[above]
                node = above
            return node

        graph, forward = self.graph, [op for op in self.indices.dims if self.searched[op]]
        for op in forward:
            for tensor in (*self.makes[op], *self.reads[op]):
                for axis, name in enumerate(self.names(op, tensor) or ()):
                    if name:
                        parent[root((True, op, name))] = root((False, tensor, axis))
        rows, samples = set(), set()
        for op in forward:
            along = {name for tensor in self.weights(op) for name in self.names(op, tensor) or ()}
            rows |= {root((True, op, name)) for name in self.indices.dims[op] if along and name not in along}
        for tensor in np.flatnonzero(graph.tensor_role == INPUT).tolist():
            if self.indices.axes.get(tensor, ())[:1] == (graph.samples,):
                samples.add(root((False, tensor, 0)))
        return {node: SAMPLE if (top := root(node)) in samples else ROW if top in rows else FEATURE for node in list(parent)}

    def _found(self, number: int, ops: list[int], divisor: int, sequence_parallel: bool) -> FoundBlock:
        local: dict[int, int] = {}
        for op in ops:
            for tensor in (*sorted(self.reads[op], key=lambda tensor: self._place(op, tensor)), *self.makes[op]):
                local.setdefault(tensor, len(local))
        values = [self._value(tensor, number, divisor, sequence_parallel) for tensor in local]
        ends: dict[int, bool] = {}
        for op in reversed(ops):
            after = [reader for tensor in self.makes[op] for reader in self.readers[tensor]]
            leaves = any(values[local[tensor]].border is not None for tensor in self.makes[op])
            ends[op] = not leaves and not any(self.product[reader] or not ends[reader] for reader in after)
        cut = tuple(self._op(op, local, divisor, ends[op], sequence_parallel) for op in ops)
        return FoundBlock(number, tuple(ops), tuple(local), Block(cut, tuple(values)))

    def _place(self, op: int, tensor: int) -> tuple[object, ...]:
        """Order of what an op reads, equal in equal blocks wherever the tensors come from."""
        outside = self.block_of_op[self.graph.tensor_producer[tensor]] != self.block_of_op[op]
        return int(self.graph.tensor_role[tensor]), bool(outside), self.names(op, tensor) or (), tensor

    def _value(self, tensor: int, number: int, divisor: int, sequence_parallel: bool) -> CutValue:
        graph, maker = self.graph, int(self.graph.tensor_producer[tensor])
        weight = graph.tensor_role[tensor] in (PARAMETER, BUFFER)
        gradient = bool(self.with_gradient[maker]) if maker >= 0 else self._is_trained(tensor)
        elsewhere = any(self.block_of_op[op] != number for op in (*([maker] if maker >= 0 else []), *self.readers[tensor]))
        runs = [self._runs.get((False, tensor, axis), ROW) for axis in range(len(self.indices.axes.get(tensor, ())))]
        sizes = self.indices.axes.get(tensor, ())
        alone = not (weight and elsewhere)  # a buffer that several blocks read stays whole
        axes = tuple((kind, alone and size % divisor == 0) for kind, size in zip(runs, sizes, strict=True))
        border = None
        if not weight and (elsewhere or maker < 0):
            stream = sequence_parallel and gradient and runs.count(ROW) == 1 and FEATURE in runs
            border = runs.index(ROW) if stream else WHOLE
        made = maker >= 0 and self.block_of_op[maker] == number
        return CutValue(axes, int(graph.tensor_bytes[tensor]), bool(weight), gradient, bool(made), border)

    def _op(self, op: int, local: dict[int, int], divisor: int, ends: bool, sequence_parallel: bool) -> CutOp:
        reads = [(tensor, self.names(op, tensor)) for tensor in self.reads[op]]
        makes = [(tensor, self.names(op, tensor)) for tensor in self.makes[op] if self.readers[tensor]]
        outputs = [names for tensor in self.makes[op] if (names := self.names(op, tensor))]
        weights = self.weights(op)
        work = float(self.graph.op_flops[op]) if self.product[op] else self._table_work(op, weights)
        known = all(names is not None for _, names in (*reads, *makes))
        dims = []
        for name, size in self.indices.dims.get(op, {}).items() if known else ():
            runs = self._runs.get((True, op, name), ROW)
            along = all(name in names for names in outputs)
            if work == 0 and weights:
                break
            if size % divisor or any(name not in names for names, _ in self.indices.statistics.get(op, ())):
                continue
            if runs == FEATURE and (weights or along):
                in_weight = any(name in (self.names(op, tensor) or ()) for tensor in weights)
                if not weights or (in_weight and not (along and self.graph.op_kind[op] == TABLE)):
                    dims.append(name)
            elif runs == ROW and sequence_parallel and along and not self.product[op] and not weights:
                dims.append(name)
        return CutOp(
            work,
            bool(weights),
            tuple(dims),
            frozenset(name for names in outputs for name in names if name and self.with_gradient[op]),
            tuple((local[tensor], names or ()) for tensor, names in reads),
            tuple((local[tensor], names or ()) for tensor, names in makes),
            ends,
        )

    def _table_work(self, op: int, weights: list[int]) -> float:
        """Bytes of a table; 0 where it is not looked up by samples or is no larger than what one sample looks up."""
        table = float(sum(self.graph.tensor_bytes[tensor] for tensor in weights))
        made = float(sum(self.graph.tensor_bytes[tensor] for tensor in self.makes[op])) / self.graph.samples
        dims = self.indices.dims.get(op, {})
        by_sample = self.graph.samples == 1 or any(self._runs.get((True, op, name)) == SAMPLE for name in dims)
        return table if by_sample and table > made else 0.0
