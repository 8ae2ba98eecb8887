"""The forward ops of a captured step, as the search for tensor-parallel layouts reads them.

The contents of axes come from the graph: dimensions of ops and axes of tensors that run along each other form one class.
The class of the first axes of the inputs are samples; other dimensions of products with a weight that do not run along the
weight are rows (the sequence); what is left can be cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.model.graph.indices import Names
from rlplace.model.graph.opgraph import BUFFER, FORWARD, INPUT, PARAMETER, OpGraph
from rlplace.problem.order import UnionFind
from rlplace.strategy.layouts.cut_moves import FEATURE, ROW, SAMPLE

PRODUCTS = ("gemm", "bmm", "attention", "conv")
TABLE = "embedding"
"""Kinds of ops that multiply, and of the op that looks rows of a weight up."""


NOT_TRACED = "the graph does not say how its ops can be cut; capture the model again, in this process"


class ForwardOps:
    """The forward ops of a captured step.

    Attributes:
        searched: bool [N], forward ops but plain views.
        product: bool [N], those that multiply.
        readers: By tensor the searched ops that read it.
        with_gradient: bool [N], searched ops that gradients pass.
        after: By searched op those that read what it makes or writes in place.
        parameters: By tensor that is a parameter, or computed from parameters alone, the tensors of those.
        makes: By op the tensors that it makes.
        reads: By searched op the tensors that it reads.
        views: By other forward op the tensors that it looks at.
    """

    def __init__(self, graph: OpGraph, block_of_op: NDArray[np.int32], only: Collection[str] | None = None) -> None:
        """Reads the graph.

        Args:
            graph: Captured in this process, by export or dispatch.
            block_of_op: int32 [N], block of every forward op; others are not looked at.
            only: Paths of modules whose weights may be cut; None: all.

        Raises:
            InputError: The graph does not say how its ops access tensors.
        """
        if graph.traced is None:
            raise InputError(NOT_TRACED)
        self.graph, self.indices, self._only = graph, graph.traced.indices, only
        maker, everything = graph.tensor_producer, np.arange(graph.num_ops)
        kind = np.array(graph.op_kind)
        self.searched = (graph.op_phase == FORWARD) & ((kind != "view") | np.isin(everything, maker))
        self.product = self.searched & np.isin(kind, PRODUCTS)
        self.readers: list[list[int]] = [[] for _ in range(graph.num_tensors)]
        self.after: dict[int, list[int]] = defaultdict(list)
        self.makes: dict[int, list[int]] = defaultdict(list)
        self.reads: dict[int, list[int]] = defaultdict(list)
        self.views: dict[int, list[int]] = defaultdict(list)
        searched, makers, sizes = self.searched.tolist(), maker.tolist(), graph.tensor_bytes.tolist()
        forward, users, ends = (graph.op_phase == FORWARD).tolist(), graph.consumers.tolist(), graph.consumer_ptr.tolist()
        for tensor, op in enumerate(makers):
            if op >= 0 and not searched[op]:
                continue
            own = users[ends[tensor] : ends[tensor + 1]]
            readers = [user for user in own if searched[user] and user != op]
            if op >= 0:
                self.after[op] += readers
            if sizes[tensor] == 0:
                continue  # something written in place, and who reads it afterwards
            if op >= 0:
                self.makes[op].append(tensor)
            self.readers[tensor] = readers
            for user in readers:
                self.reads[user].append(tensor)
            for user in own:
                if forward[user] and not searched[user]:
                    self.views[user].append(tensor)
        self.parameters = self._parameters()
        self.with_gradient = self._with_gradient()
        self.given, self.block_of_op = block_of_op, self._joined(block_of_op)
        self._runs = self._classes()

    def names(self, op: int, tensor: int) -> Names | None:
        """Returns an op's dimensions along a tensor, None where that is not known."""
        return self.indices.access.get(tensor, {}).get(op)

    def runs(self, op: int, name: str) -> int:
        """Returns the contents of a dimension of an op: `SAMPLE`, `ROW` or `FEATURE`."""
        return self._runs.get((True, op, name), ROW)

    def runs_along(self, tensor: int, axis: int) -> int:
        """Returns the contents of an axis of a tensor."""
        return self._runs.get((False, tensor, axis), ROW)

    def may_cut(self, op: int) -> bool:
        """Returns whether the weights that an op reads may be cut."""
        return self._only is None or all(self.owner(op, tensor) in self._only for tensor in self.weights(op))

    def owner(self, op: int, tensor: int) -> str:
        """Returns the module that holds a parameter which an op reads; of several the one that runs the op."""
        record = self.graph.parameters[self.graph.tensor_parameter[min(self.parameters[tensor])]]
        owners = [name.rpartition(".")[0] for name in (record.name, *record.aliases)]
        return self.graph.op_module[op] if self.graph.op_module[op] in owners else owners[0]

    def weights(self, op: int) -> list[int]:
        """Returns parameters of two or more axes that an op multiplies by or looks rows up in."""
        if not (self.product[op] or self.graph.op_kind[op] == TABLE):
            return []
        records, index = self.graph.parameters, self.graph.tensor_parameter
        return [t for t in self.reads[op] if any(len(records[index[p]].shape) > 1 for p in self.parameters.get(t, ()))]

    def _parameters(self) -> dict[int, frozenset[int]]:
        found = {tensor: frozenset((tensor,)) for tensor in np.flatnonzero(self.graph.tensor_role == PARAMETER).tolist()}
        for op in np.flatnonzero(self.searched).tolist():
            reads = [tensor for tensor in self.reads[op] if self.graph.tensor_role[tensor] != BUFFER]
            if reads and all(tensor in found for tensor in reads):
                found |= dict.fromkeys(self.makes[op], frozenset().union(*(found[tensor] for tensor in reads)))
        return found

    def _with_gradient(self) -> NDArray[np.bool_]:
        """Returns ops between a parameter that is trained and an op that has work in the backward pass."""
        graph, order = self.graph, np.flatnonzero(self.searched).tolist()
        trained = {tensor for op in order for tensor in self.reads[op] if self.is_trained(tensor)}
        for op in order:
            if trained.intersection(self.reads[op]):
                trained.update(self.makes[op])
        passed = np.isin(np.arange(graph.num_ops), graph.op_forward[graph.op_phase != FORWARD])
        for op in reversed(order):
            passed[op] |= any(passed[reader] for reader in self.after[op])
            passed[op] &= not trained.isdisjoint(self.reads[op])
        return passed

    def is_trained(self, tensor: int) -> bool:
        """Returns whether a tensor is a parameter with a gradient."""
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
        """Returns `SAMPLE`, `ROW` or `FEATURE` for (True, op, dimension) and (False, tensor, axis)."""
        sets, nodes = UnionFind(), set[tuple[bool, int, str | int]]()
        graph, forward = self.graph, [op for op in self.indices.dims if self.searched[op]]
        for op in forward:
            for tensor in (*self.makes[op], *self.reads[op]):
                for axis, name in enumerate(self.names(op, tensor) or ()):
                    if name:
                        sets.union((False, tensor, axis), (True, op, name))
                        nodes |= {(False, tensor, axis), (True, op, name)}
        rows, samples = set(), set()
        for op in forward:
            along = {name for tensor in self.weights(op) for name in self.names(op, tensor) or ()}
            rows |= {sets.find((True, op, name)) for name in self.indices.dims[op] if along and name not in along}
        for tensor in np.flatnonzero(graph.tensor_role == INPUT).tolist():
            if self.indices.axes.get(tensor, ())[:1] == (graph.samples,):
                samples.add(sets.find((False, tensor, 0)))
                nodes.add((False, tensor, 0))
        return {node: SAMPLE if (top := sets.find(node)) in samples else ROW if top in rows else FEATURE for node in nodes}
