"""Tensor-parallel layouts of the blocks of a captured step, for any degree, found from the graph alone.

Every kind of block is searched once by PaSE's dynamic program (`rlplace.strategy.cut_block`). For transformers that gives the
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
from rlplace.graph.opgraph import OpGraph
from rlplace.strategy.block_graph import FoundBlock, found_block, found_blocks
from rlplace.strategy.cut_block import Block, BlockCut, cut_block, whole_block
from rlplace.strategy.forward_ops import ForwardOps
from rlplace.strategy.tensor_layout import TensorLayout, layout_of


def tensor_layouts(
    graph: OpGraph,
    block_of_op: NDArray[np.int32],
    degree: int,
    *,
    sequence_parallel: bool = False,
    only: Collection[str] | None = None,
) -> TensorLayout:
    """Cuts every block of a step over a tensor group.

    Args:
        graph: Captured in this process at any batch size; the answer holds for `rescale`d graphs, too.
        block_of_op: int32 [N], block of every forward op. What passes from block to block is whole on every device, or cut
            along the sequence.
        degree: Devices of the group.
        sequence_parallel: Whether activations between products are cut along the sequence.
        only: Paths of modules whose weights may be cut, such as those that a runtime has layouts for; None: all.

    Returns:
        The layout. A block in which nothing can be cut is whole on every device.

    Raises:
        InputError: `why_not` has a reason, or the graph does not say how its ops access tensors.
    """
    return layouts_of(ForwardOps(graph, block_of_op, only), degree, sequence_parallel=sequence_parallel)


def layouts_of(ops: ForwardOps, degree: int, *, sequence_parallel: bool = False) -> TensorLayout:
    """`tensor_layouts` of forward ops that were read before, for several degrees."""
    whole_number(degree, "tensor_layouts: degree", 1)
    found, cuts, reason = _search(ops, degree, sequence_parallel)
    if reason is not None:
        raise InputError(f"tensor_layouts: {reason}")
    return layout_of(ops, zip(found, cuts, strict=True), degree, sequence_parallel=sequence_parallel)


def why_not(
    graph: OpGraph,
    block_of_op: NDArray[np.int32],
    degree: int,
    *,
    sequence_parallel: bool = False,
    only: Collection[str] | None = None,
) -> str | None:
    """Why `tensor_layouts` has no answer; None where it has one."""
    return _search(ForwardOps(graph, block_of_op, only), degree, sequence_parallel)[2]


def _search(
    ops: ForwardOps, degree: int, sequence_parallel: bool
) -> tuple[list[FoundBlock], list[BlockCut | None], str | None]:
    """All blocks, the cut of each, and why not. Equal blocks are searched once."""
    found = found_blocks(ops, degree, sequence_parallel=sequence_parallel)
    if degree == 1:
        return found, [whole_block(item.block) for item in found], None
    known: dict[Block, BlockCut | None] = {}
    reasons: list[str] = []
    for item in found:
        if item.block not in known:
            known[item.block] = cut_block(item.block, degree, sequence_parallel=sequence_parallel)
            reasons += _undivided(ops, item, known[item.block], degree, sequence_parallel)
    if not reasons and not any(
        op.weighted for block, cut in known.items() if cut for op, dim in zip(block.ops, cut.dims, strict=True) if dim
    ):
        reasons.append(f"no product with a weight can be cut into {degree} parts")
    return found, [known[item.block] for item in found], next(iter(reasons), None)


def _undivided(ops: ForwardOps, item: FoundBlock, cut: BlockCut | None, degree: int, sequence_parallel: bool) -> Iterator[str]:
    """What the best cut of the block cuts if sizes do not matter, but the degree does not divide."""
    if cut is None:
        borders = [(tensor, value.border) for tensor, value in zip(item.tensors, item.block.values, strict=True)]
        sizes = [ops.indices.axes[tensor][axis] for tensor, axis in borders if axis is not None and axis >= 0]
        size = next(size for size in sizes if size % degree)
        yield f"the sequence of {size} positions cannot be cut into {degree} parts; leave sequence parallelism out"
        return
    whole = [
        ops.product[op] and not record.ends and not dim
        for op, record, dim in zip(item.ops, item.block.ops, cut.dims, strict=True)
    ]
    ideal = found_block(ops, item.number, item.ops, 1, sequence_parallel).block
    if not any(whole) or ideal == item.block:
        return
    best = cut_block(ideal, degree, sequence_parallel=sequence_parallel)
    for op, left, wanted in zip(item.ops, whole, best.dims if best else (), strict=bool(best)):
        size = ops.indices.dims.get(op, {}).get(wanted, degree)
        if left and size % degree:
            what = "heads" if ops.graph.op_kind[op] == "attention" else "columns or heads"
            yield f"tensor degree {degree} does not divide the {size} {what} of {ops.graph.op_names[op]}"
