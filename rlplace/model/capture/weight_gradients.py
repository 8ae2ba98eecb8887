"""Splits the backward ops of a graph into input gradients and weight gradients, as zero-bubble pipelines run them.

The gradient of a linear layer is two products: dX = dY W, which the layers before wait for, and dW = X^T dY, which only the
optimizer does. A backward op that makes gradients of parameters *and* passes gradients on becomes two ops: an input-gradient
op that keeps its name and phase, and ``NAME_weight`` of phase backward_weight, run after it (Qi et al. 2023; torch does the
same in `stage_backward_input` and `stage_backward_weight`). A backward op that does nothing but parameter gradients
(embeddings, the first layer, ops on parameters alone) becomes a weight-gradient op as a whole. FLOPs and bytes
add up to what they were.

Not split: attention and selective scans, whose kernels make all gradients in one walk, and ops that others wait for after an
in-place write.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.model.graph.atoms import picked
from rlplace.model.graph.opgraph import (
    ACTIVATION,
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    GRADIENT,
    INPUT,
    PARAMETER,
    UPDATE,
    OpGraph,
)

_PRODUCTS = ("gemm", "conv", "bmm")  # dX needs W but not X, dW needs X but not W
_HALVES = (*_PRODUCTS, "recurrent", "module")  # as much arithmetic for the input as the forward took
_WHOLE = ("attention", "scan")


def split_weight_gradients(graph: OpGraph) -> tuple[OpGraph, NDArray[np.int32]]:
    """Returns the graph with weight gradients as ops of their own, and which op each of its ops comes from.

    Args:
        graph: A captured step of N ops whose weight gradients are not split yet.

    Returns:
        A graph of N' ops with the same parameters and the same work, and int32 [N'], the op of `graph` that each of them is (a
        part of). Both parts of a split op wait for the incoming gradient. The parts of a matrix product or convolution read
        only what they need: the input part the weight, the weight part the saved input; parts of other ops read all that the
        op read.

    Raises:
        InputError: The graph has weight-gradient ops already.
    """
    if (graph.op_phase == BACKWARD_WEIGHT).any():
        raise InputError("weight gradients: the graph has weight-gradient ops already; split it once")
    constant = _forward_of_parameters(graph)
    weight_side = _weight_side(graph, constant)
    makes_weight, passes_on, ordered = _outputs(graph, weight_side)
    kinds = np.array(graph.op_kind)[np.maximum(graph.op_forward, 0)]  # of the forward: autograd adds gradients to a backward op
    backward = graph.op_phase == BACKWARD
    only = backward & makes_weight & ~passes_on
    split = backward & makes_weight & passes_on & ~ordered & ~np.isin(kinds, _WHOLE)

    first = np.arange(graph.num_ops) + np.concatenate([[0], np.cumsum(split)[:-1]])
    second = first + split  # the weight part; the op itself where it is whole
    origin = np.repeat(np.arange(graph.num_ops, dtype=np.int32), 1 + split)
    is_weight = np.zeros(len(origin), dtype=bool)
    is_weight[second[split | only]] = True
    reads = _read_by_parts(graph, split, kinds, constant)
    flops, moved = _shares(graph, weight_side, split, kinds, origin, is_weight, reads)

    producer = graph.tensor_producer
    producing_op = np.maximum(producer, 0)
    new_producer = np.where(weight_side, second[producing_op], first[producing_op])
    tensor, consumers = _edges(graph, split, first, second, reads)
    ties = np.flatnonzero(split)  # the weight part runs after the input part
    count = graph.num_tensors
    tensor = np.concatenate([tensor, count + np.arange(len(ties))])
    consumers = np.concatenate([consumers, second[ties]])
    order = np.lexsort((consumers, tensor))
    sizes = np.bincount(tensor, minlength=count + len(ties))
    per_op = picked(graph, origin)
    per_op["op_names"] = tuple(
        f"{name}_weight" if weight else name for name, weight in zip(per_op["op_names"], is_weight.tolist(), strict=True)
    )
    per_op["op_phase"] = np.where(is_weight, BACKWARD_WEIGHT, per_op["op_phase"]).astype(np.int8)
    per_op["op_forward"] = np.where(per_op["op_forward"] >= 0, first[per_op["op_forward"]], -1).astype(np.int32)
    per_op["op_flops"], per_op["op_bytes"] = flops, moved
    launches = per_op.get("op_launches")
    if launches is not None:
        halves = np.where(is_weight, launches - launches // 2, launches // 2)
        per_op["op_launches"] = np.where(split[origin], halves, launches).astype(np.int32)
    parts = {op: {int(first[op]), int(second[op])} for op in graph.op_dims}
    result = dataclasses.replace(
        graph,
        **per_op,
        op_dims={part: graph.op_dims[op] for op, numbers in parts.items() for part in sorted(numbers)},
        tensor_role=np.concatenate([graph.tensor_role, np.full(len(ties), ACTIVATION, dtype=np.int8)]),
        tensor_parameter=np.concatenate([graph.tensor_parameter, np.full(len(ties), -1, dtype=np.int32)]),
        tensor_producer=np.concatenate([np.where(producer >= 0, new_producer, -1), first[ties]]).astype(np.int32),
        tensor_bytes=np.concatenate([graph.tensor_bytes, np.zeros(len(ties), dtype=np.int64)]),
        consumer_ptr=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        consumers=consumers[order].astype(np.int32),
        source=None if graph.source is None else {**graph.source, "weight_gradients": True},
        traced=None,  # its op numbers are those before the split
    )
    return result, origin


def part_times(whole_s: NDArray[np.float64], parts_s: NDArray[np.float64], origin: NDArray[np.int32]) -> NDArray[np.float64]:
    """Times of split ops that add up to those of the ops they come from.

    Args:
        whole_s: float64 [N, D], times before the split.
        parts_s: float64 [N', D], time of each part on its own; only the ratio of two parts counts.
        origin: int32 [N'], see `split_weight_gradients`.

    Returns:
        float64 [N', D].
    """
    total = np.zeros_like(whole_s)
    np.add.at(total, origin, parts_s)
    number = np.bincount(origin, minlength=len(whole_s))[origin, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(total[origin] > 0, parts_s / total[origin], 1.0 / number)
    return np.where(number == 1, whole_s[origin], whole_s[origin] * share)


def _forward_of_parameters(graph: OpGraph) -> NDArray[np.bool_]:
    """Marks [N] the forward ops that no input of the model reaches."""
    forward = graph.op_phase == FORWARD
    tensor = graph.edge_tensor
    reached = np.zeros(graph.num_ops, dtype=bool)
    reached[graph.consumers[graph.tensor_role[tensor] == INPUT]] = True
    inner = np.flatnonzero(forward[graph.consumers] & (graph.tensor_producer[tensor] >= 0))
    inner = inner[np.argsort(graph.consumers[inner], kind="stable")]  # ops are listed after what they depend on
    seen = reached.tolist()
    for source, op in zip(graph.tensor_producer[tensor[inner]].tolist(), graph.consumers[inner].tolist(), strict=True):
        seen[op] = seen[op] or seen[source]
    return forward & ~np.array(seen, dtype=bool)


def _weight_side(graph: OpGraph, constant: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Marks [T] the gradients that lead to parameters alone: of parameters, and of tensors computed from them alone."""
    aside = (graph.op_phase == BACKWARD) & constant[np.maximum(graph.op_forward, 0)]
    tensor, producer = graph.edge_tensor, graph.tensor_producer
    made_by_backward = (producer >= 0) & (graph.op_phase[np.maximum(producer, 0)] == BACKWARD)
    while True:
        held_up = np.zeros(graph.num_tensors, dtype=bool)
        held_up[tensor[~aside[graph.consumers] & (graph.op_phase[graph.consumers] != UPDATE)]] = True
        side = made_by_backward & ((graph.tensor_role == GRADIENT) | ~held_up)
        leak = np.zeros(graph.num_ops, dtype=bool)
        leak[producer[made_by_backward & ~side]] = True
        if not (aside & leak).any():
            return side
        aside &= ~leak


def _outputs(graph: OpGraph, weight_side: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Marks [N] the ops that make weight-side tensors, that make others, and that others wait for without taking bytes."""
    makes_weight, passes_on, ordered = np.zeros((3, graph.num_ops), dtype=bool)
    produced = graph.tensor_producer >= 0
    makes_weight[graph.tensor_producer[produced & weight_side]] = True
    passes_on[graph.tensor_producer[produced & ~weight_side]] = True
    ordered[graph.tensor_producer[produced & ~weight_side & (graph.tensor_bytes == 0)]] = True
    return makes_weight, passes_on, ordered


def _read_by_parts(
    graph: OpGraph, split: NDArray[np.bool_], kinds: NDArray[np.str_], constant: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Marks [E] which edges into split ops the input part and the weight part need."""
    tensor, into = graph.edge_tensor, split[graph.consumers]
    producer = graph.tensor_producer[tensor]
    is_weight = (graph.tensor_role[tensor] == PARAMETER) | ((producer >= 0) & constant[np.maximum(producer, 0)])
    is_gradient = (producer >= 0) & (graph.op_phase[np.maximum(producer, 0)] != FORWARD)
    product = np.isin(kinds[graph.consumers], _PRODUCTS)
    saved = ~is_weight & ~is_gradient
    return into & ~(product & saved), into & ~(product & is_weight)


def _shares(
    graph: OpGraph,
    weight_side: NDArray[np.bool_],
    split: NDArray[np.bool_],
    kinds: NDArray[np.str_],
    origin: NDArray[np.int32],
    is_weight: NDArray[np.bool_],
    reads: tuple[NDArray[np.bool_], NDArray[np.bool_]],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns FLOPs float64 and bytes int64 [N'] of the new ops.

    Bytes are those that each part reads and writes. FLOPs of products by the forward: the input gradient costs as much, the
    rest (with the bias) is the weight's; at most half. FLOPs of other ops go with their bytes.
    """
    touched = np.zeros((2, graph.num_ops))
    size = graph.tensor_bytes.astype(np.float64)
    for part, read in enumerate(reads):
        np.add.at(touched[part], graph.consumers[read], size[graph.edge_tensor[read]])
    produced = graph.tensor_producer >= 0
    for part, writes in enumerate((produced & ~weight_side, produced & weight_side)):
        np.add.at(touched[part], graph.tensor_producer[writes], size[writes])
    total = touched.sum(axis=0)
    share = np.where(total > 0, touched[0] / np.maximum(total, 1.0), 0.5)
    bytes_input = np.rint(graph.op_bytes * share).astype(np.int64)
    forward_flops = graph.op_flops[np.maximum(graph.op_forward, 0)]
    halves = np.minimum(forward_flops, graph.op_flops / 2)
    flops_input = np.where(np.isin(kinds, _HALVES), halves, graph.op_flops * share)
    parted = split[origin]
    flops = np.where(is_weight, (graph.op_flops - flops_input)[origin], flops_input[origin])
    moved = np.where(is_weight, (graph.op_bytes - bytes_input)[origin], bytes_input[origin])
    return np.where(parted, flops, graph.op_flops[origin]), np.where(parted, moved, graph.op_bytes[origin])


def _edges(
    graph: OpGraph,
    split: NDArray[np.bool_],
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    reads: tuple[NDArray[np.bool_], NDArray[np.bool_]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns tensor and consumer of every edge of the new graph, in no order."""
    by_input, by_weight = reads
    whole = ~split[graph.consumers]
    tensor = graph.edge_tensor.astype(np.int64)
    return (
        np.concatenate([tensor[whole | by_input], tensor[by_weight]]),
        np.concatenate([first[graph.consumers[whole | by_input]], second[graph.consumers[by_weight]]]),
    )
