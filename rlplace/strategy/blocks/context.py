"""Layouts over a context group, which cuts the sequence, by the three methods of `rlplace.runtime.strategy.attention`.

What comes before the first block with attention works on whole sequences, what follows on a part. Of a fused attention
``gather`` gathers the keys and values of all devices, keeps them for the backward and reduces their gradients. ``heads`` trades
positions of queries, keys, values and results for heads, in all-to-alls both ways. ``ring`` passes keys and values on in
degree - 1 steps, each hidden under the attention to those before, and in the backward their gradients, too, in fp32. A device
has two parts, one from each half of the sequence, so that a causal mask leaves all devices equal work. The capture has the
dimensions along the sequence (`rlplace.strategy.layouts.forward_ops`).
"""

from __future__ import annotations

from collections import defaultdict
from math import prod

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.presets import DeviceKind
from rlplace.cost.scaled import context_attention_times
from rlplace.model.graph.opgraph import BUFFER, FORWARD, GRADIENT, PARAMETER, UPDATE, OpGraph
from rlplace.plan.strategy import GATHER, HEADS, RING, ContextMethod
from rlplace.strategy.costs import (
    BACKWARD_PASS,
    CONTEXT_ALL_TO_ALL,
    CONTEXT_GATHER,
    CONTEXT_SCATTER,
    FORWARD_PASS,
    Cut,
    Floats,
)
from rlplace.strategy.layouts.cut_moves import ROW
from rlplace.strategy.layouts.forward_ops import ForwardOps
from rlplace.strategy.layouts.tensor_layout import LayoutCollective, TensorLayout

_PRICED = ("m", "queries", "rows")
"""Names of the dimensions along the sequence by which ops are priced."""


def why_no_context(ops: ForwardOps, cut: Cut) -> str | None:
    """Explains why the sequence cannot be divided; None where it can."""
    attention, degree = _attention(ops), cut.context
    if not attention:
        return "the model has no fused attention along a sequence, which context parallelism needs; leave context at 1"
    for op in np.flatnonzero(ops.product).tolist():
        kind = ops.graph.op_kind[op]
        alone = kind == "conv" or (kind in ("gemm", "bmm") and not ops.weights(op))
        if alone and _rows(ops, op):
            return f"{ops.graph.op_names[op]} works along the sequence, but is no fused attention; leave context at 1"
    for op in attention:
        heads = ops.graph.op_dims.get(op, {}).get("heads", 1)
        if cut.context_method == HEADS and heads % (degree * cut.tensor):
            return f"{heads} heads of attention cannot be dealt to {degree * cut.tensor} devices; take another context_method"
        for name in _rows(ops, op):
            size = ops.indices.dims[op][name]
            if size % (2 * degree):
                return (
                    f"a sequence of {size} positions cannot be cut into {2 * degree} parts, two for each device of the context"
                )
    return None


def context_layout(ops: ForwardOps, cut: Cut, routed: NDArray[np.bool_]) -> TensorLayout:
    """Returns the layout of a step, which `why_no_context` allows, over a context group.

    `routed` is bool [N], ops that work on the tokens of experts.
    """
    graph, indices, degree = ops.graph, ops.indices, cut.context
    op_parts, tensor_parts = (np.ones(count, dtype=np.int32) for count in (graph.num_ops, graph.num_tensors))
    held = np.isin(graph.tensor_role, (PARAMETER, BUFFER, GRADIENT))
    before = min(int(ops.given[op]) for op in _attention(ops))
    whole_op = (graph.op_phase == FORWARD) & (ops.given < before)
    for tensor, sizes in indices.axes.items():
        if not held[tensor] and any(ops.runs_along(tensor, axis) == ROW for axis in range(len(sizes))):
            tensor_parts[tensor] = degree
    for op in np.flatnonzero(graph.op_phase == FORWARD).tolist():
        if whole_op[op]:
            continue
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
    if cut.context_method == HEADS:
        dims |= {op: "heads" for op, named in graph.op_dims.items() if "heads" in named and "queries" in named and op in dims}
    whole = np.ones(len(graph.parameters), dtype=np.int32)
    collectives = tuple(item for op in _attention(ops) for item in _exchanges(ops, op, cut))
    return TensorLayout(degree, op_parts, dims, tensor_parts, whole, collectives, {})


def context_bytes(
    graph: OpGraph, layout: TensorLayout, tensor_bytes: NDArray[np.int64], method: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns int64 [2, N], bytes that the attention of a part takes beside its own while it runs, and until its backward.

    `tensor_bytes` is int64 [T], of the whole sequence. Where keys and values are tensors of their own, what is gathered of them
    is kept in place of the part; views of one tensor with the queries keep that, too. Activations before the first attention
    are whole until a block takes its part, and the gradients of its two runs are made whole.
    """
    passing, kept = np.zeros((2, graph.num_ops), dtype=np.int64)
    behind = (graph.op_phase != FORWARD) & (graph.op_phase != UPDATE) & (graph.op_forward >= 0)
    ahead = (graph.op_phase == FORWARD) & (layout.op_parts == 1) & np.isin(np.arange(graph.num_ops), graph.op_forward[behind])
    made = np.flatnonzero((graph.tensor_producer >= 0) & ahead[graph.tensor_producer] & (layout.tensor_parts > 1))
    whole = np.bincount(graph.tensor_producer[made], tensor_bytes[made], graph.num_ops).astype(np.int64)
    passing += whole - whole // layout.degree
    for item in layout.collectives:
        if item.when != FORWARD_PASS:
            continue
        size, part = (round(int(tensor_bytes[item.tensor]) * item.times / parts) for parts in (1, layout.degree))
        beside = graph.tensor_producer[item.tensor] == item.op
        if method == GATHER:
            passing[item.op] += size
            kept[item.op] += size - (0 if beside else part)
        elif method == HEADS:
            passing[item.op] += part
            kept[item.op] += part if beside else 0
        else:  # what is sent and what comes, and both of its gradients
            passing[item.op] += 4 * part
    passing[behind] = (passing + whole)[graph.op_forward[behind]]
    return passing, kept


def hidden_s(graph: OpGraph, layout: TensorLayout, seconds: Floats) -> dict[tuple[int, int], float]:
    """Returns by attention op and pass the seconds, of float64 [N] of all ops, in which keys and values go around beside it."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    hides = (layout.degree - 1) / layout.degree
    rings = {item.op for item in layout.collectives if item.kind == CONTEXT_GATHER and item.when == BACKWARD_PASS}
    ahead = graph.op_phase == FORWARD
    origin = np.where(ahead, np.arange(graph.num_ops), graph.op_forward)
    for op in np.flatnonzero(np.isin(origin, [*rings])):
        found[int(origin[op]), FORWARD_PASS if ahead[op] else BACKWARD_PASS] += hides * float(seconds[op])
    return found


def kernel_times(graph: OpGraph, layout: TensorLayout, kind: DeviceKind, method: ContextMethod) -> Floats:
    """Returns float64 [N], how many times as long every op takes in a context group as by the kernel that runs without one."""
    times = np.ones(graph.num_ops)
    if method != HEADS:
        attention = {item.op for item in layout.collectives}
        for op in (number for number, name in enumerate(graph.op_kind) if name == "attention"):
            behind = graph.op_phase[op] != FORWARD
            origin = int(graph.op_forward[op]) if behind else op
            if origin in attention:
                dims, dtype = graph.op_dims.get(origin, {}), graph.op_dtype[origin]
                times[op] = context_attention_times(kind, dtype, dims, ring=method == RING, backward=bool(behind))
    return times


def _exchanges(ops: ForwardOps, op: int, cut: Cut) -> list[LayoutCollective]:
    """Returns the collectives of a context group for an attention."""
    graph, rows = ops.graph, set(_rows(ops, op))
    before = graph.edge_tensor[graph.consumers == op]
    writers = graph.tensor_producer[before[graph.tensor_bytes[before] == 0]].tolist()
    queries: list[int] = []
    keys: list[int] = []
    for tensor in ops.reads[op]:
        names = ops.names(op, tensor) or ()
        along = [name for axis, name in enumerate(names) if ops.runs_along(tensor, axis) == ROW]
        makers = [int(graph.tensor_producer[tensor]), *(writer for writer in writers if tensor in ops.reads[writer])]
        if along and any(maker >= 0 and ops.with_gradient[maker] for maker in makers):
            (queries if rows.intersection(along) else keys).append(tensor)
    made = max(ops.makes[op], key=lambda tensor: int(graph.tensor_bytes[tensor]))
    if not queries:  # all three are parts of one tensor: each is as large as what is made
        queries, keys = [made], [made, made]
    heads = graph.op_dims.get(op, {}).get("heads", 1)
    sent = [max(cut.tensor / heads, _shared(graph, op, key)) * _read(graph, op, key) for key in keys]  # at least one head
    ahead, behind = FORWARD_PASS, BACKWARD_PASS
    gathers = (ahead, CONTEXT_GATHER), (behind, CONTEXT_SCATTER)
    moves = [(key, when, kind, times) for key, times in zip(keys, sent, strict=True) for when, kind in gathers]
    if cut.context_method == RING:
        wide = 2.0 if graph.op_dtype[op] in ("bfloat16", "float16") else 1.0
        moves = [(key, when, CONTEXT_GATHER, times) for key, times in zip(keys, sent, strict=True) for when in (ahead, behind)]
        moves += [(key, behind, CONTEXT_SCATTER, wide * times) for key, times in zip(keys, sent, strict=True)]
    if cut.context_method == HEADS:
        own = [
            heads / cut.tensor * times * graph.tensor_bytes[key] / graph.tensor_bytes[made]
            for key, times in zip(keys, sent, strict=True)
        ]
        repeated = [times * max(1.0, cut.context / max(1.0, held)) for times, held in zip(sent, own, strict=True)]
        pairs = zip((queries[0], *keys, made), (1.0, *repeated, 1.0), strict=True)
        moves = [(tensor, when, CONTEXT_ALL_TO_ALL, times) for tensor, times in pairs for when in (ahead, behind)]
    return [LayoutCollective(int(ops.given[op]), op, *move) for move in moves]


def _shared(graph: OpGraph, op: int, tensor: int) -> float:
    """Returns the part of keys or values that is no copy for queries that share heads, which causal attention does without.

    Models of transformers repeat heads where they make a mask, as of padded batches.
    """
    maker = int(graph.tensor_producer[tensor])
    read = graph.edge_tensor[graph.consumers == maker]
    repeats = graph.op_kind[maker] == "copy" and len(read) == 1 and bool(graph.op_dims.get(op, {}).get("causal"))
    return min(1.0, float(graph.tensor_bytes[read[0]] / graph.tensor_bytes[tensor])) if repeats else 1.0


def _read(graph: OpGraph, op: int, tensor: int) -> float:
    """Returns the part of a tensor that attention reads as keys or values: one tensor may hold values and parts of keys."""
    space, dims = graph.traced.accesses.get(op) if graph.traced else None, graph.op_dims.get(op, {})
    if graph.traced is None or space is None or "width" not in dims:
        return 1.0
    storage, widths = graph.traced.rows[tensor][0], (dims["width"], dims.get("value_width", dims["width"]))
    own = [(use, width) for use, width in zip(space.uses[2:4], widths, strict=False) if use.storage == storage]
    read = sum(dims["keys"] * width * prod(size for _, size, _ in use.runs) for use, width in own)
    return min(1.0, read / own[0][0].elements) if own else 1.0


def _attention(ops: ForwardOps) -> list[int]:
    """Returns the ops of fused attention along a sequence."""
    return [op for op in np.flatnonzero(ops.searched).tolist() if ops.graph.op_kind[op] == "attention" and _rows(ops, op)]


def _rows(ops: ForwardOps, op: int) -> list[str]:
    """Returns dimensions of an op along the sequence."""
    return [name for name in ops.indices.dims.get(op, {}) if ops.runs(op, name) == ROW]
