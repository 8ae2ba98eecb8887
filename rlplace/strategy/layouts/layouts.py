"""Tensor-parallel layouts of the blocks of a captured step, for any degree, found from the graph alone.

Every kind of block is searched once by PaSE's dynamic program (`rlplace.strategy.layouts.cut_block`). For transformers that
gives the
layout of Megatron: the products that read the residual stream are cut by columns, heads stay together, those that write it are
cut by rows, and each half of a block has one all-reduce forward and one backward. Along the sequence an all-gather and a
reduce-scatter take their place.

Samples belong to the data axes and are never cut, so that a layout found at one batch size holds at all: `rescale` keeps the
numbers of ops and tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, whole_number
from rlplace.model.graph.opgraph import OpGraph
from rlplace.strategy.layouts.cut_block import BlockCut, CutBlock, FoundBlock, cut_block, found_blocks
from rlplace.strategy.layouts.cut_moves import WHOLE
from rlplace.strategy.layouts.forward_ops import ForwardOps
from rlplace.strategy.layouts.tensor_layout import TensorLayout, layout_of


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
        cuts, reason = self._search(degree, sequence_parallel)
        if reason is not None:
            raise InputError(f"tensor_layouts: {reason}")
        return layout_of(self.ops, cuts, degree)

    def _search(self, degree: int, sequence_parallel: bool) -> tuple[list[tuple[FoundBlock, BlockCut | None]], str | None]:
        """Returns all blocks with their cuts, and why not. Equal blocks are searched once."""
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
        return [(item, known[item.block]) for item in found], next(iter(reasons), None)

    def _undivided(self, item: FoundBlock, cut: BlockCut | None, degree: int) -> Iterator[str]:
        """What the best cut of the block cuts if sizes do not matter, but the degree does not divide."""
        ops = self.ops
        if cut is None:
            sizes = [value.axes[value.border][1] for value in item.block.values if value.border not in (None, WHOLE)]
            size = next(size for size in sizes if size % degree)
            yield f"the sequence of {size} positions cannot be cut into {degree} parts; leave sequence parallelism out"
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
