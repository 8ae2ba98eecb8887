"""The ops of a captured model as the op-level expansion of strategies reads them; updates are there, but in no block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import BACKWARD, BACKWARD_WEIGHT, FORWARD, GRADIENT, UPDATE, OpGraph
from rlplace.strategy.blocks.blocks import Blocks
from rlplace.strategy.blocks.lives import Lives, model_inputs, plain_views, selected
from rlplace.strategy.blocks.op_costs import StepOps, TensorCollective
from rlplace.strategy.costs import NONE, RECOMPUTE, SELECTIVE, Bytes
from rlplace.strategy.layouts.divide import moved_bytes
from rlplace.strategy.layouts.tensor_layout import TensorLayout


def captured_step(graph: OpGraph, origin: NDArray[np.int32], blocks: Blocks, lives: Lives) -> StepOps:
    """Ops and tensors of a step.

    Args:
        graph: The captured step, or the same with weight gradients apart.
        origin: int32 [N], which captured op each of its ops is (a part of).
        blocks: Of the captured step.
        lives: Likewise.
    """
    tensor, reader = graph.edge_tensor.astype(np.int64), graph.consumers.astype(np.int64)
    read = (graph.op_phase[reader] != UPDATE) & ~plain_views(graph)[reader]
    forward, kept = graph.op_phase == FORWARD, selected(graph)
    again = np.zeros((len(RECOMPUTE), graph.num_ops), dtype=bool)
    for how, ops in enumerate(lives.again):
        again[how] = forward & np.isin(origin, ops)
    inputs, first_block = model_inputs(graph, blocks.of_op[origin])
    input_block = np.full(graph.num_tensors, -1, dtype=np.int64)
    input_block[inputs] = first_block
    return StepOps(
        names=graph.op_names,
        phase=graph.op_phase,
        block=np.where(graph.op_phase == UPDATE, -1, blocks.of_op[origin]).astype(np.int32),
        producer=graph.tensor_producer.astype(np.int64),
        input_block=input_block,
        is_gradient=graph.tensor_role == GRADIENT,
        tensor=tensor[read],
        reader=reader[read],
        again=again,
        cached=np.stack([forward & kept & (how == SELECTIVE) for how in range(NONE, len(RECOMPUTE))]),
        retained=_retained(graph, tensor[read], reader[read]),
    )


def halved_bytes(step: StepOps, tensor_bytes: Bytes, kept_bytes: Bytes) -> Bytes:
    """What is kept from the first half of a split backward to the second: int64 [R, B], as `kept_bytes` [R, B].

    Args:
        step: Ops with weight gradients apart.
        tensor_bytes: int64 [T].
        kept_bytes: From the forward to the backward.
    """
    maker, count = np.maximum(step.producer[step.tensor], 0), kept_bytes.shape[1]
    size = np.where((step.producer >= 0) & ~step.is_gradient, tensor_bytes, 0)
    between = np.zeros(len(size), dtype=bool)
    between[step.tensor[(step.phase[maker] == BACKWARD) & (step.phase[step.reader] == BACKWARD_WEIGHT)]] = True
    made = step.producer[between & (size > 0)]
    found = kept_bytes + np.bincount(step.block[made], size[between & (size > 0)], count).astype(np.int64)
    ahead, behind = step.phase[maker] == FORWARD, step.phase[step.reader] != FORWARD
    for how in range(len(kept_bytes)):
        gone, stays = np.zeros((2, len(size)), dtype=bool)
        gone[step.tensor[ahead & behind]] = True
        stays[step.tensor[(ahead & behind & step.retained[step.reader]) | step.again[how][step.reader]]] = True
        of_op = step.again[how] | step.cached[how]
        gone &= ~stays & ~of_op[np.maximum(step.producer, 0)] & (size > 0)
        found[how] -= np.bincount(step.block[step.producer[gone]], size[gone], count).astype(np.int64)
    return np.maximum(found, 0)


def _retained(graph: OpGraph, tensor: NDArray[np.int64], reader: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks [N] backward ops whose forward op comes before a weight, or has one."""
    forward, weighted = graph.op_phase == FORWARD, np.zeros(graph.num_ops, dtype=bool)
    weighted[graph.op_forward[graph.op_phase == BACKWARD_WEIGHT]] = True
    maker = graph.tensor_producer[tensor]
    inner = (maker >= 0) & forward[reader] & forward[np.maximum(maker, 0)]
    order = np.argsort(-reader[inner], kind="stable")  # ops are listed after what they depend on
    for source, op in zip(maker[inner][order].tolist(), reader[inner][order].tolist(), strict=True):
        if weighted[op]:
            weighted[source] = True
    found: NDArray[np.bool_] = weighted[np.maximum(graph.op_forward, 0)]
    return found


def captured_collectives(
    graph: OpGraph, layout: TensorLayout, tensor_bytes: Bytes, origin: NDArray[np.int32]
) -> Iterator[TensorCollective]:
    """What a group sends in a pass.

    Args:
        graph: The captured step.
        layout: How it is cut.
        tensor_bytes: int64 [T], of tensors that this layout does not cut.
        origin: See `captured_step`.
    """
    number = np.searchsorted(origin, [item.op for item in layout.collectives]).tolist()
    for op, item in zip(number, layout.collectives, strict=True):
        made_here = graph.tensor_producer[item.tensor] == item.op
        size_bytes = float(moved_bytes(layout, item, tensor_bytes))
        yield TensorCollective(item.block, item.when, item.kind, size_bytes, op + (0.5 if made_here else -0.5))
