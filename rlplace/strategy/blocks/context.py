"""How a pass is cut when a context group divides the sequence: all ops work on a part of it, attention gathers keys and values.

That is what torch's `context_parallel` does: fused attention gathers the keys and values of all devices (its default method,
"allgather") in the forward and again in the backward, and passes their gradients round the group in fp32, which moves what a
reduce-scatter moves. A device has two parts, one from each half of the sequence, so that a causal mask leaves everybody equal
work. What runs along the sequence is known from the capture (`rlplace.strategy.layouts.forward_ops`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import BUFFER, FORWARD, GRADIENT, PARAMETER, UPDATE, OpGraph
from rlplace.strategy.costs import BACKWARD_PASS, CONTEXT_GATHER, CONTEXT_SCATTER, FORWARD_PASS
from rlplace.strategy.layouts.cut_moves import ROW
from rlplace.strategy.layouts.forward_ops import ForwardOps
from rlplace.strategy.layouts.tensor_layout import Collective, TensorLayout

_PRICED = ("m", "queries", "rows")
"""Names of the dimensions along the sequence by which ops are priced."""


def why_no_context(ops: ForwardOps, degree: int) -> str | None:
    """Why the sequence cannot be divided; None where it can."""
    attention = _attention(ops)
    if not attention:
        return "the model has no fused attention along a sequence, which context parallelism needs; leave context at 1"
    for op in np.flatnonzero(ops.product).tolist():
        kind = ops.graph.op_kind[op]
        alone = kind == "conv" or (kind in ("gemm", "bmm") and not ops.weights(op))
        if alone and _rows(ops, op):
            return f"{ops.graph.op_names[op]} works along the sequence, but is no fused attention; leave context at 1"
    for op in attention:
        for name in _rows(ops, op):
            size = ops.indices.dims[op][name]
            if size % (2 * degree):
                return (
                    f"a sequence of {size} positions cannot be cut into {2 * degree} parts, two for each device of the context"
                )
    return None


def context_layout(ops: ForwardOps, degree: int, routed: NDArray[np.bool_]) -> TensorLayout:
    """The layout of a step over a context group.

    Args:
        ops: Of the captured step; `why_no_context` has no reason.
        degree: Devices of the group.
        routed: bool [N], ops that work on the tokens of experts.
    """
    graph, indices = ops.graph, ops.indices
    op_parts, tensor_parts = (np.ones(count, dtype=np.int32) for count in (graph.num_ops, graph.num_tensors))
    held = np.isin(graph.tensor_role, (PARAMETER, BUFFER, GRADIENT))
    for tensor, sizes in indices.axes.items():
        if not held[tensor] and any(ops.runs_along(tensor, axis) == ROW for axis in range(len(sizes))):
            tensor_parts[tensor] = degree
    for op in np.flatnonzero(graph.op_phase == FORWARD).tolist():
        reads = ops.reads[op] if ops.searched[op] else ops.views[op]
        if routed[op] or (_rows(ops, op) if op in indices.dims else any(tensor_parts[tensor] > 1 for tensor in reads)):
            op_parts[op] = degree
        for tensor in ops.makes[op]:
            if not held[tensor] and (routed[op] or tensor not in indices.axes):
                tensor_parts[tensor] = op_parts[op]
    follows = (graph.op_phase != FORWARD) & (graph.op_phase != UPDATE) & (graph.op_forward >= 0)
    op_parts[follows] = op_parts[graph.op_forward[follows]]
    behind = (graph.tensor_producer >= 0) & follows[np.maximum(graph.tensor_producer, 0)] & ~held
    tensor_parts[behind] = op_parts[graph.tensor_producer[behind]]
    dims = {
        op: next((name for name in _PRICED if name in named), "") for op, named in graph.op_dims.items() if op_parts[op] > 1
    }
    whole = np.ones(len(graph.parameters), dtype=np.int32)
    collectives = tuple(item for op in _attention(ops) for item in _exchanges(ops, op))
    return TensorLayout(degree, op_parts, dims, tensor_parts, whole, collectives, {})


def gathered_bytes(graph: OpGraph, layout: TensorLayout, tensor_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [N], keys and values of the whole sequence that ops have for a moment.

    Args:
        graph: The captured step.
        layout: Of a context group.
        tensor_bytes: int64 [T], of the whole sequence.
    """
    size = np.zeros(graph.num_ops, dtype=np.int64)
    for item in layout.collectives:
        if (item.kind, item.when) == (CONTEXT_GATHER, FORWARD_PASS):
            size[item.op] += tensor_bytes[item.tensor]
    behind = (graph.op_phase != FORWARD) & (graph.op_phase != UPDATE) & (graph.op_forward >= 0)
    size[behind] = size[graph.op_forward[behind]]
    return size


def _exchanges(ops: ForwardOps, op: int) -> list[Collective]:
    """What a context group sends for an attention."""
    graph, rows = ops.graph, set(_rows(ops, op))
    queries: list[int] = []
    keys: list[int] = []
    for tensor in ops.reads[op]:
        names = ops.names(op, tensor) or ()
        along = [name for axis, name in enumerate(names) if ops.runs_along(tensor, axis) == ROW]
        maker = int(graph.tensor_producer[tensor])
        if along and maker >= 0 and ops.with_gradient[maker]:
            (queries if rows.intersection(along) else keys).append(tensor)
    if not queries:  # all three are parts of one tensor: keys and values are as large as what is made, each
        made = max(ops.makes[op], key=lambda tensor: int(graph.tensor_bytes[tensor]))
        keys = [made, made]
    halves = 2 if graph.op_dtype[op] in ("bfloat16", "float16") else 1  # gradients are summed in fp32
    moves = [(FORWARD_PASS, CONTEXT_GATHER), (BACKWARD_PASS, CONTEXT_GATHER), *[(BACKWARD_PASS, CONTEXT_SCATTER)] * halves]
    return [Collective(int(ops.given[op]), op, tensor, when, kind) for tensor in keys for when, kind in moves]


def _attention(ops: ForwardOps) -> list[int]:
    """Fused attention along a sequence."""
    return [op for op in np.flatnonzero(ops.searched).tolist() if ops.graph.op_kind[op] == "attention" and _rows(ops, op)]


def _rows(ops: ForwardOps, op: int) -> list[str]:
    """Dimensions of an op along the sequence."""
    return [name for name in ops.indices.dims.get(op, {}) if ops.runs(op, name) == ROW]
