"""What one device of a tensor group does and holds: captured ops and tensors, divided as a layout says."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import BUFFER, GRADIENT, PARAMETER, UPDATE, OpGraph
from rlplace.strategy.costs import COLLECTIVE_KINDS, EXPERT_ALL_TO_ALL, Floats
from rlplace.strategy.layouts.tensor_layout import Collective, TensorLayout

_LOOKED_UP = ("embedding", "gather")
"""Kinds of ops that read a part of their table."""


def tensor_parts(graph: OpGraph, layout: TensorLayout) -> NDArray[np.int64]:
    """int64 [T], into how many parts each tensor of the captured graph is cut."""
    of_parameter = np.isin(graph.tensor_role, (PARAMETER, BUFFER, GRADIENT))
    own = layout.parameter_parts[np.maximum(graph.tensor_parameter, 0)] if graph.parameters else layout.tensor_parts
    return np.where(of_parameter, own, layout.tensor_parts).astype(np.int64)


def shares(values: NDArray[np.int64], parts: NDArray[Any]) -> NDArray[np.int64]:
    """The largest of so many parts of whole values."""
    return -(-values // parts)


def divided(graph: OpGraph, layout: TensorLayout, ops: NDArray[Any], parts_of_tensor: NDArray[Any]) -> OpGraph:
    """Ops as one device of the group runs them; the same ops and tensors, smaller.

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
    dims = {op: dict(sizes) for op, sizes in graph.op_dims.items()}
    captured = ops.tolist()
    for op, sizes in dims.items():
        name = layout.op_dims.get(captured[op])
        if name in sizes:
            sizes[name] = max(1, sizes[name] // layout.degree)
    return dataclasses.replace(
        graph,
        op_flops=graph.op_flops / parts,
        op_bytes=np.where((parts > 1) | np.isin(ops, layout.thin_ops), np.rint(moved).astype(np.int64), graph.op_bytes),
        op_temporary_bytes=shares(graph.op_temporary_bytes, parts),
        op_dims=dims,
        tensor_bytes=size,
    )


def moved_by(layout: TensorLayout, tensor_bytes: NDArray[np.int64], blocks: int) -> tuple[Floats, Floats]:
    """Bytes of whole tensors (int64 [T]), and calls, that the group moves in a pass: float64 [2, K, B] each."""
    size, calls = np.zeros((2, 2, len(COLLECTIVE_KINDS), blocks))
    for item in layout.collectives:
        size[item.when, item.kind, item.block] += moved_bytes(layout, item, tensor_bytes)
        calls[item.when, item.kind, item.block] += 1
    return size, calls


def moved_bytes(layout: TensorLayout, item: Collective, tensor_bytes: NDArray[np.int64]) -> int:
    """Bytes of the whole tensor that a collective moves; of an all-to-all of experts those that a device has."""
    parts = int(layout.tensor_parts[item.tensor]) if item.kind == EXPERT_ALL_TO_ALL else 1
    return -(-int(tensor_bytes[item.tensor]) // parts)


def _touched(graph: OpGraph, size: NDArray[np.int64]) -> Floats:
    """float64 [N], the part of the bytes of the tensors that an op reads and writes that is left."""
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
