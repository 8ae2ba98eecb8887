"""Tensor-parallel layouts of the blocks of a captured step, for any degree, found from the graph alone.

Every kind of block is searched once by PaSE's dynamic program (`rlplace.strategy.layouts.cut_block`); all cuts together are the
layout. For transformers that is Megatron's: the products that read the residual stream are cut by columns, heads stay
together, those that write it are cut by rows, and each half of a block has one all-reduce forward and one backward. Along the
sequence an all-gather and a reduce-scatter take their place.

Samples belong to the data axes and are never cut, so that a layout found at one batch size holds at all: `rescale` keeps the
numbers of ops and tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, whole_number
from rlplace.model.graph.opgraph import BUFFER, FORWARD, GRADIENT, PARAMETER, UPDATE, OpGraph
from rlplace.strategy.costs import ALL_GATHER, COLLECTIVE_KINDS, CONTEXT_ALL_TO_ALL, EXPERT_ALL_TO_ALL, FORWARD_PASS, Floats
from rlplace.strategy.layouts.cut_block import BlockCut, CutBlock, FoundBlock, cut_block, found_blocks
from rlplace.strategy.layouts.cut_moves import ROW, WHOLE, CutOp
from rlplace.strategy.layouts.forward_ops import TABLE, ForwardOps

VOCABULARY = "vocabulary"


def plain_word(word: str) -> str:
    """Drops from a word of `TensorLayout.modules` what is packed or gathered: column, row, vocabulary, sequence or local."""
    return VOCABULARY if word == "embedding" or "gathered" in word else word.rpartition(" ")[2]


@dataclass(frozen=True)
class LayoutCollective:
    """A collective of the tensor group in one pass of a micro-batch.

    Attributes:
        block: Number of the block.
        op: Forward op that makes the tensor, or, for a tensor of another block, the first one that reads it.
        tensor: The activation; in the backward pass its gradient is what moves.
        when: Index into the passes of `rlplace.strategy.costs`.
        kind: Index into `COLLECTIVE_KINDS`.
        times: Bytes that move, over those of the tensor.
    """

    block: int
    op: int
    tensor: int
    when: int
    kind: int
    times: float = 1.0


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """The cut of the blocks of a step over a tensor group.

    Attributes:
        degree: Devices of the group.
        op_parts: int32 [N], into how many parts the work of an op is cut; 1: every device does all of it.
        op_dims: Op to the dimension that is cut, named as in the graph's `op_dims` where the op has an entry there.
        tensor_parts: int32 [T], parts of what stays on a device; 1 where a device keeps the whole, gathered or not.
        parameter_parts: int32 [P].
        collectives: Collectives of the group in a pass.
        modules: Layout word by path of a module with parameters; other modules are whole. "column", "row"; "packed column":
            several matrices in one, each cut; "gathered column": its output is gathered; "embedding": rows of a table;
            "sequence": works on a part of the sequence; "local": works on what others have cut.
        thin_ops: int64, ops that may be whole, but read or write weights that are cut: those move less.
    """

    degree: int
    op_parts: NDArray[np.int32]
    op_dims: Mapping[int, str]
    tensor_parts: NDArray[np.int32]
    parameter_parts: NDArray[np.int32]
    collectives: tuple[LayoutCollective, ...]
    modules: Mapping[str, str]
    thin_ops: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class LayoutSearch:
    """Layouts of one captured step at several degrees.

    Args:
        graph: Captured in this process at any batch size; the answers hold for `rescale`d graphs, too.
        block_of_op: int32 [N], block of every forward op. What passes from block to block is whole on every device, or cut
            along the sequence.
        only: Paths of modules whose weights may be cut, such as those that a runtime has layouts for; None: all.

    Attributes:
        ops: The forward ops of the step.

    Raises:
        InputError: The graph does not say how its ops access tensors.
    """

    def __init__(self, graph: OpGraph, block_of_op: NDArray[np.int32], only: Collection[str] | None = None) -> None:
        self.ops = ForwardOps(graph, block_of_op, only)
        self._blocks: dict[bool, list[FoundBlock]] = {}

    def layout(self, degree: int, *, sequence_parallel: bool = False) -> TensorLayout:
        """Cuts every block over a tensor group.

        Args:
            degree: Devices of the group.
            sequence_parallel: Whether activations between products are cut along the sequence.

        Returns:
            The layout. A block in which nothing can be cut is whole on every device.

        Raises:
            InputError: There is none; says why.
        """
        whole_number(degree, "tensor_layouts: degree", 2)
        if sequence_parallel not in self._blocks:
            self._blocks[sequence_parallel] = found_blocks(self.ops, sequence_parallel=sequence_parallel)
        found = self._blocks[sequence_parallel]
        known: dict[CutBlock, BlockCut | None] = {}
        reasons: list[str] = []
        for item in found:
            if item.block not in known:
                known[item.block] = cut_block(item.block, degree)
                reasons += self._undivided(item, known[item.block], degree)
        cut_ops = (op for block, cut in known.items() if cut for op, dim in zip(block.ops, cut.dims, strict=True) if dim)
        if not reasons and not any(op.weighted for op in cut_ops):
            reasons.append(f"no product with a weight can be cut into {degree} parts")
        if reasons:
            raise InputError(f"tensor_layouts: {reasons[0]}")
        return _Layout(self.ops, degree).of((item, known[item.block]) for item in found)

    def _undivided(self, item: FoundBlock, cut: BlockCut | None, degree: int) -> Iterator[str]:
        """Yields dimensions that the best cut would cut if the degree divided them."""
        ops = self.ops
        if cut is None:
            sizes = [value.axes[value.border][1] for value in item.block.values if value.border not in (None, WHOLE)]
            size = next((size for size in sizes if size % degree), None)
            what = f"the result of {ops.graph.op_names[item.ops[-1]]}" if size is None else f"the sequence of {size} positions"
            yield f"{what} cannot be cut into {degree} parts; leave sequence parallelism out"
            return
        records = zip(item.ops, item.block.ops, cut.dims, strict=True)
        whole = [bool(ops.product[op]) and not record.ends and not dim for op, record, dim in records]
        if not any(whole) or all(size % degree == 0 for record in item.block.ops for _, size in record.dims):
            return
        best = cut_block(item.block, degree, any_size=True)
        for op, left, wanted in zip(item.ops, whole, best.dims if best else (), strict=bool(best)):
            size = ops.indices.dims.get(op, {}).get(wanted, degree)
            if left and size % degree:
                what = "heads" if ops.graph.op_kind[op] == "attention" else "columns or heads"
                yield f"tensor degree {degree} does not divide the {size} {what} of {ops.graph.op_names[op]}"


class _Layout:
    """Puts the cuts of blocks together."""

    def __init__(self, ops: ForwardOps, degree: int) -> None:
        graph = ops.graph
        self.ops, self.graph, self.degree = ops, graph, degree
        self.op_dims: dict[int, str] = {}
        self.op_parts = np.ones(graph.num_ops, dtype=np.int32)
        self.axis = np.full(graph.num_tensors, WHOLE, dtype=np.int64)
        self.tensor_parts = np.ones(graph.num_tensors, dtype=np.int32)
        self.collectives: list[LayoutCollective] = []
        self.modules: dict[str, str] = {}

    def of(self, cuts: Iterable[tuple[FoundBlock, BlockCut | None]]) -> TensorLayout:
        graph = self.graph
        for item, cut in cuts:
            assert cut is not None
            self._block(item, cut)
        self._views()
        follows = (graph.op_phase != FORWARD) & (graph.op_forward >= 0)
        self.op_parts[follows] = self.op_parts[graph.op_forward[follows]]
        for op in np.flatnonzero(follows).tolist():
            if int(graph.op_forward[op]) in self.op_dims:
                self.op_dims[op] = self.op_dims[int(graph.op_forward[op])]
        parts = np.ones(len(graph.parameters), dtype=np.int32)
        cut_ones = np.isin(graph.tensor_role, (PARAMETER, BUFFER)) & (self.axis >= 0)
        parts[graph.tensor_parameter[cut_ones]] = self.tensor_parts[cut_ones]
        updates = np.flatnonzero(graph.op_phase == UPDATE)
        self.op_parts[updates] = parts[graph.op_parameter[updates]]
        self._tensors(parts)
        dims = {op: self._priced_name(op, name) for op, name in self.op_dims.items()}
        for array in (self.op_parts, self.tensor_parts, parts):
            array.setflags(write=False)
        return TensorLayout(self.degree, self.op_parts, dims, self.tensor_parts, parts, tuple(self.collectives), self.modules)

    def _block(self, item: FoundBlock, cut: BlockCut) -> None:
        graph = self.graph
        for op, record, dim in zip(item.ops, item.block.ops, cut.dims, strict=True):
            if dim:
                self.op_dims[op], self.op_parts[op] = dim, max(self._ways(item, record, dim))
        for tensor, state, value in zip(item.tensors, cut.layouts, item.block.values, strict=True):
            if value.made or value.weight:
                self.axis[tensor] = state
                parts = item.block.parts(value, state, self.degree) if state >= 0 else 1
                self.tensor_parts[tensor] = parts if parts == self.degree or not value.weight else 1
        for number, when, kind in cut.moves:
            tensor = item.tensors[number]
            maker = int(graph.tensor_producer[tensor])
            op = maker if item.block.values[number].made else next(op for op in item.ops if op in self.ops.readers[tensor])
            self.collectives.append(LayoutCollective(int(self.ops.given[op]), op, tensor, when, kind))
            if (when, kind) == (FORWARD_PASS, ALL_GATHER):
                self.tensor_parts[tensor] = 1  # torch keeps what was gathered for the backward pass
        for op, record, dim in zip(item.ops, item.block.ops, cut.dims, strict=True):
            own = [item.tensors[number] for number, _ in record.reads if item.tensors[number] in self.ops.parameters]
            if dim and own:
                weights = self.ops.weights(op)
                self.modules[self.ops.owner(op, weights[0] if weights else own[0])] = self._word(op, record, dim)

    def _ways(self, item: FoundBlock, record: CutOp, dim: str) -> Iterator[int]:
        """Yields into how many unlike parts the cut of an op takes each value."""
        for number, names in (*record.reads, *record.makes):
            if dim in names:
                yield item.block.parts(item.block.values[number], names.index(dim), self.degree)

    def _word(self, op: int, record: CutOp, dim: str) -> str:
        if not record.weighted:
            return "sequence" if self.ops.runs(op, dim) == ROW else "local"
        if self.graph.op_kind[op] == TABLE:
            return "embedding"
        if not any(dim in (self.ops.names(op, tensor) or ()) for tensor in self.ops.makes[op]):
            return "row"
        weight = self.ops.weights(op)[0]
        packed = self._pieces(weight, (self.ops.names(op, weight) or ()).index(dim)) > 1
        gathered = all(self.axis[tensor] < 0 for tensor in self.ops.makes[op] if self.ops.readers[tensor])
        return ("packed " if packed else "") + ("gathered " if gathered else "") + "column"

    def _pieces(self, tensor: int, axis: int) -> int:
        """Returns the pieces of an axis of a parameter's storage that are each cut (3 for packed queries, keys and values)."""
        pieces, rest = 1, list(self.graph.parameters[self.graph.tensor_parameter[tensor]].shape)
        for size in self.ops.indices.axes[tensor][:axis]:
            pieces *= size
            while rest and pieces >= rest[0]:
                pieces //= rest.pop(0)
        return pieces

    def _views(self) -> None:
        """Views of cut tensors, whose backward ops may be work, are cut as well."""
        for op in np.flatnonzero((self.graph.op_phase == FORWARD) & ~self.ops.searched).tolist():
            for tensor in self.ops.views[op]:
                if self.axis[tensor] >= 0 and self.tensor_parts[tensor] > 1:
                    names = self.ops.names(op, tensor)
                    self.op_parts[op] = self.degree
                    if names is not None and names[self.axis[tensor]]:
                        self.op_dims[op] = names[self.axis[tensor]]

    def _tensors(self, parameter_parts: NDArray[np.int32]) -> None:
        """Sets parts of gradients, and of tensors that only an op and its backward op use."""
        graph, access = self.graph, self.ops.indices.access
        for tensor in np.flatnonzero((graph.tensor_producer >= 0) & (graph.tensor_bytes > 0)).tolist():
            maker = int(graph.tensor_producer[tensor])
            if graph.tensor_role[tensor] == GRADIENT:
                self.tensor_parts[tensor] = parameter_parts[graph.tensor_parameter[tensor]]
            elif graph.op_phase[maker] != FORWARD or not self.ops.readers[tensor]:
                names, dim = access.get(tensor, {}).get(maker), self.op_dims.get(maker)
                cut = dim in names if names is not None and dim is not None else True
                self.tensor_parts[tensor] = self.op_parts[maker] if cut else 1

    def _priced_name(self, op: int, name: str) -> str:
        """Returns a dimension by the name that the graph's `op_dims` have for it, which prices are read by."""
        graph = self.graph
        forward = int(graph.op_forward[op])
        known, kind = graph.op_dims.get(op) or graph.op_dims.get(forward, {}), graph.op_kind[op]
        if kind == "attention":
            priced = "heads"
        elif kind in ("gemm", "bmm"):
            made = any(name in (self.ops.names(forward, tensor) or ()) for tensor in self.ops.makes[forward])
            read = sum(name in (self.ops.names(forward, tensor) or ()) for tensor in self.ops.reads[forward])
            priced = "k" if not made else "batch" if read > 1 and not self.ops.weights(forward) else "n"
        else:
            priced = "rows"
        return priced if priced in known else name


_LOOKED_UP = ("embedding", "gather")
"""Kinds of ops that read a part of their table."""


def tensor_parts(graph: OpGraph, layout: TensorLayout) -> NDArray[np.int64]:
    """Returns int64 [T], into how many parts each tensor of the captured graph is cut."""
    of_parameter = np.isin(graph.tensor_role, (PARAMETER, BUFFER, GRADIENT))
    own = layout.parameter_parts[np.maximum(graph.tensor_parameter, 0)] if graph.parameters else layout.tensor_parts
    return np.where(of_parameter, own, layout.tensor_parts).astype(np.int64)


def shares(values: NDArray[np.int64], parts: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the largest of so many parts of whole values."""
    return -(-values // parts)


def divided(graph: OpGraph, layout: TensorLayout, ops: NDArray[Any], parts_of_tensor: NDArray[Any]) -> OpGraph:
    """Returns ops as one device of the group runs them; the same ops and tensors, smaller.

    The bytes that a cut op moves shrink like what it reads and writes: a product whose weight is cut still reads all of its
    input where that is whole.

    Args:
        graph: Some ops (or parts of ops) of the captured graph, at any batch size.
        layout: How the captured graph is cut.
        ops: int [N'], which op of the captured graph each op is.
        parts_of_tensor: int [T'], see `tensor_parts`.
    """
    parts = layout.op_parts[ops].astype(np.int64)
    size = shares(graph.tensor_bytes, parts_of_tensor)
    moved = graph.op_bytes * np.where(graph.op_phase == UPDATE, 1.0 / parts, _touched(graph, size))
    dims, captured = dict(graph.op_dims), ops.tolist()
    for op, sizes in graph.op_dims.items():
        name = layout.op_dims.get(captured[op])
        if name is not None and name in sizes:
            dims[op] = {**sizes, name: max(1, sizes[name] // int(parts[op]))}
    return dataclasses.replace(
        graph,
        op_flops=graph.op_flops / parts,
        op_bytes=np.where((parts > 1) | np.isin(ops, layout.thin_ops), np.rint(moved).astype(np.int64), graph.op_bytes),
        op_temporary_bytes=shares(graph.op_temporary_bytes, parts),
        op_dims=dims,
        tensor_bytes=size,
    )


def moved_by(layout: TensorLayout, tensor_bytes: NDArray[np.int64], blocks: int) -> tuple[Floats, Floats]:
    """Returns bytes of whole tensors (int64 [T]), and calls, that the group moves in a pass: float64 [2, K, B] each."""
    size, calls = np.zeros((2, 2, len(COLLECTIVE_KINDS), blocks))
    for item in layout.collectives:
        size[item.when, item.kind, item.block] += moved_bytes(layout, item, tensor_bytes)
        calls[item.when, item.kind, item.block] += 1
    return size, calls


def moved_bytes(layout: TensorLayout, item: LayoutCollective, tensor_bytes: NDArray[np.int64]) -> int:
    """Returns bytes of the whole tensor that a collective moves; of an all-to-all of experts or heads those of a device."""
    parts = int(layout.tensor_parts[item.tensor]) if item.kind in (EXPERT_ALL_TO_ALL, CONTEXT_ALL_TO_ALL) else 1
    return round(-(-int(tensor_bytes[item.tensor]) // parts) * item.times)


def _touched(graph: OpGraph, size: NDArray[np.int64]) -> Floats:
    """Returns float64 [N], the part of the bytes of the tensors that an op reads and writes that is left."""
    looked_up = np.array([kind in _LOOKED_UP for kind in graph.op_kind], dtype=bool)
    made = np.flatnonzero(graph.tensor_producer >= 0)
    tensor = np.concatenate([graph.edge_tensor, made])
    op = np.concatenate([graph.consumers, graph.tensor_producer[made]])
    counted = ~(looked_up[op] & np.isin(graph.tensor_role[tensor], (PARAMETER, GRADIENT)))
    before, after = (
        np.bincount(op[counted], values[tensor[counted]], graph.num_ops).astype(np.float64)
        for values in (graph.tensor_bytes, size)
    )
    return np.divide(after, before, out=np.ones_like(before), where=before > 0)
