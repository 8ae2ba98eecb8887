"""What one device of a tensor group does and holds: the captured graph, divided as a layout says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace.graph.opgraph import BUFFER, GRADIENT, PARAMETER, UPDATE, OpGraph, Parameter
from rlplace.strategy.costs import COLLECTIVE_KINDS, Floats

if TYPE_CHECKING:
    from rlplace.strategy.tensor_layout import TensorLayout

_LOOKED_UP = ("embedding", "gather")
"""Kinds of ops that read a part of their table."""


def divided(graph: OpGraph, layout: TensorLayout) -> OpGraph:
    """A graph of any batch size as one device of the group runs it; the same ops and tensors, smaller.

    The bytes that a cut op moves shrink like what it reads and writes: a product whose weight is cut still reads all of its
    input where that is whole.
    """
    parts = layout.op_parts.astype(np.int64)
    of_parameter = np.isin(graph.tensor_role, (PARAMETER, BUFFER, GRADIENT))
    index = np.maximum(graph.tensor_parameter, 0)
    pieces = np.where(of_parameter, layout.parameter_parts[index] if graph.parameters else 1, layout.tensor_parts)
    size = _ceil(graph.tensor_bytes, pieces)
    moved = graph.op_bytes * np.where(graph.op_phase == UPDATE, 1.0 / parts, _touched(graph, size))
    dims = {op: dict(sizes) for op, sizes in graph.op_dims.items()}
    for op, name in layout.op_dims.items():
        if name in dims.get(op, {}):
            dims[op][name] = max(1, dims[op][name] // layout.degree)
    return dataclasses.replace(
        graph,
        op_flops=graph.op_flops / parts,
        op_bytes=np.where(parts > 1, np.rint(moved).astype(np.int64), graph.op_bytes),
        op_temporary_bytes=_ceil(graph.op_temporary_bytes, parts),
        op_dims=dims,
        tensor_bytes=size,
        parameters=tuple(map(_part, graph.parameters, layout.parameter_parts.tolist())),
        traced=None,
    )


def moved_by(graph: OpGraph, layout: TensorLayout, blocks: int) -> tuple[Floats, Floats]:
    """Bytes of whole tensors and calls, float64 [2, K, B] each, that the group moves in a pass of the undivided graph."""
    size, calls = np.zeros((2, 2, len(COLLECTIVE_KINDS), blocks))
    for item in layout.collectives:
        size[item.when, item.kind, item.block] += item.size_bytes(graph)
        calls[item.when, item.kind, item.block] += 1
    return size, calls


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


def _part(parameter: Parameter, parts: int) -> Parameter:
    if parts == 1:
        return parameter
    sizes: dict[str, Any] = {
        name: -(-getattr(parameter, name) // parts) for name in ("size_bytes", "gradient_bytes", "optimizer_bytes")
    }
    return msgspec.structs.replace(parameter, **sizes)


def _ceil(values: NDArray[np.int64], parts: NDArray[Any]) -> NDArray[np.int64]:
    return -(-values // parts)
