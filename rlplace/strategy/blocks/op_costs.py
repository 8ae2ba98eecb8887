"""Costs of a model op by op, for the op-level expansion of a strategy, beside the costs of its blocks.

Axes: N forward and backward ops, T tensors. Updates are those of the blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import BACKWARD, BACKWARD_WEIGHT, FORWARD, GRADIENT, UPDATE, OpGraph, Parameter
from rlplace.strategy.blocks.blocks import Blocks
from rlplace.strategy.blocks.lives import Lives, model_inputs, plain_views, selected
from rlplace.strategy.costs import (
    BACKWARD_PASS,
    FORWARD_PASS,
    NONE,
    RECOMPUTE,
    SELECTIVE,
    STATISTICS,
    BlockCosts,
    Bytes,
    Cut,
    Floats,
    HeldCosts,
    Tie,
)
from rlplace.strategy.layouts.tensor_layout import TensorLayout, moved_bytes, shares


@dataclass(frozen=True, eq=False)
class StepOps:
    """The ops of a pass and who reads what; sizes and times are in `PassOps`.

    Attributes:
        names: N.
        phase: int8 [N], index into `rlplace.problem.problem.PHASES`.
        block: int32 [N], ascending op numbers are the order in which a block runs them.
        producer: int64 [T], the op that makes a tensor, -1 for inputs of the model.
        input_block: int64 [T], the block that reads an input of the model first, -1 for other tensors.
        is_gradient: bool [T], gradients of weights.
        tensor: int64 [E], tensors that ops read.
        reader: int64 [E], the ops; views that keep no storage alive are left out.
        again: bool [R, N], forward ops that run again in the backward of their block, by choice of recomputation.
        cached: bool [R, N], ops whose outputs are kept until their block runs again.
        retained: bool [N], backward ops whose part of the autograd graph the first half of a split backward leaves: it detaches
            the outputs, so that what comes after the last weight goes.
    """

    names: Sequence[str]
    phase: NDArray[np.int8]
    block: NDArray[np.int32]
    producer: NDArray[np.int64]
    input_block: NDArray[np.int64]
    is_gradient: NDArray[np.bool_]
    tensor: NDArray[np.int64]
    reader: NDArray[np.int64]
    again: NDArray[np.bool_]
    cached: NDArray[np.bool_]
    retained: NDArray[np.bool_]


class TensorCollective(NamedTuple):
    """A collective inside a block, of its tensor, context or expert group.

    Attributes:
        block: The block.
        when: Index of the pass (`FORWARD_PASS`, `BACKWARD_PASS`).
        kind: Index into `COLLECTIVE_KINDS`.
        size_bytes: Of the whole tensor.
        place: Where it stands among the forward ops of its block: behind op n at n + 0.5, before it at n - 0.5.
        hidden_s: Seconds of the op beside it that hide as many of its own.
    """

    block: int
    when: int
    kind: int
    size_bytes: float
    place: float
    hidden_s: float = 0.0


@dataclass(frozen=True, eq=False)
class PassOps:
    """One pass on one device of a tensor group.

    Attributes:
        seconds: float64 [N].
        temporary_bytes: int64 [N].
        tensor_bytes: int64 [T].
        collectives: What the group sends.
    """

    seconds: Floats
    temporary_bytes: Bytes
    tensor_bytes: Bytes
    collectives: tuple[TensorCollective, ...]


class OpCosts(BlockCosts, Protocol):
    """Costs of blocks that are also known op by op."""

    def step_ops(self, split: bool) -> StepOps:
        """Returns the ops of a pass; `split`: weight gradients are ops of their own."""
        ...

    def pass_ops(self, kind: int, cut: Cut, split: bool) -> PassOps:
        """Returns their times and sizes on a device of that kind.

        Raises:
            InputError: `why_not` has a reason.
        """
        ...


def slowest(passes: list[PassOps]) -> PassOps:
    """Returns every op as slow and every tensor as large as in the worst of some passes, of devices in lockstep."""
    if len(passes) == 1:
        return passes[0]
    seconds, temporary, sizes = (
        np.max([getattr(item, name) for item in passes], axis=0) for name in ("seconds", "temporary_bytes", "tensor_bytes")
    )
    collectives = tuple(
        max(same, key=lambda item: item.size_bytes) for same in zip(*(p.collectives for p in passes), strict=True)
    )
    return PassOps(seconds, temporary, sizes, collectives)


def captured_step(graph: OpGraph, origin: NDArray[np.int32], blocks: Blocks, lives: Lives) -> StepOps:
    """Returns ops and tensors of a captured step, whole or with weight gradients apart.

    `origin` is int32 [N], the captured op that each op is (a part of); `blocks` and `lives` are those of the captured step.
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
    """Returns int64 [R, B], bytes kept from the first half of a split backward to the second.

    Args:
        step: Ops with weight gradients apart.
        tensor_bytes: int64 [T].
        kept_bytes: int64 [R, B], from the forward to the backward.
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
    graph: OpGraph,
    layout: TensorLayout,
    tensor_bytes: Bytes,
    origin: NDArray[np.int32],
    hidden_s: Mapping[tuple[int, int], float],
) -> Iterator[TensorCollective]:
    """Yields the collectives of a layout's group in a pass.

    Args:
        graph: The captured graph.
        layout: Its cut over the group.
        tensor_bytes: int64 [T], not cut by this layout.
        origin: See `captured_step`.
        hidden_s: By op and pass, seconds that hide what moves around.
    """
    together = Counter[tuple[int, int]]()
    for item in layout.collectives:
        together[item.op, item.when] += item.times  # type: ignore[assignment]
    number = np.searchsorted(origin, [item.op for item in layout.collectives]).tolist()
    for op, item in zip(number, layout.collectives, strict=True):
        made_here = graph.tensor_producer[item.tensor] == item.op
        size_bytes = float(moved_bytes(layout, item, tensor_bytes))
        hidden = hidden_s.get((item.op, item.when), 0.0) * item.times / together[item.op, item.when]
        yield TensorCollective(item.block, item.when, item.kind, size_bytes, op + (0.5 if made_here else -0.5), hidden)


def statistics_sums(graph: OpGraph, blocks: Blocks, origin: NDArray[np.int32]) -> Iterator[TensorCollective]:
    """Yields what BatchNorms exchange in a pass to normalize by the samples of all replicas, as SyncBatchNorm does.

    A forward sends two moments of every channel and the number of values, a backward the gradients of both.
    """
    channels = {p.name.rpartition(".")[0]: p.shape[0] for p in graph.parameters if p.name.endswith(("running_mean", ".weight"))}
    norms = (op for op in np.flatnonzero(graph.op_phase == FORWARD).tolist() if "batch_norm" in graph.op_target[op])
    for op in norms:
        count, number = channels.get(graph.op_module[op], 0), float(np.searchsorted(origin, op))
        if count:
            block = int(blocks.of_op[op])
            yield TensorCollective(block, FORWARD_PASS, STATISTICS, 4.0 * (2 * count + 1), number - 0.5)
            yield TensorCollective(block, BACKWARD_PASS, STATISTICS, 4.0 * 2 * count, number + 0.5)


def representatives(
    graph: OpGraph, blocks: Blocks, classes: NDArray[np.int64], layouts: Sequence[TensorLayout]
) -> NDArray[np.int64]:
    """Returns int64 [B], the first block of the same class whose ops are cut in the same way."""
    parts = np.stack([np.ones(graph.num_ops, dtype=np.int32), *(layout.op_parts for layout in layouts)])
    inside = graph.op_phase == FORWARD
    first: dict[tuple[int, bytes], int] = {}
    ways = [parts[:, inside & (blocks.of_op == block)].tobytes() for block in range(len(blocks.names))]
    return np.array([first.setdefault((int(classes[b]), way), b) for b, way in enumerate(ways)], dtype=np.int64)


def held_costs(
    graph: OpGraph,
    blocks: Blocks,
    layout: TensorLayout | None = None,
    spread: Collection[int] = (),
    *,
    released: bool = False,
) -> HeldCosts:
    """Returns the state of a device; `spread` are the parameters that an expert group spreads."""
    parts, experts = np.zeros((2, 3, len(blocks.names)), dtype=np.int64)
    pieces = [1] * len(graph.parameters) if layout is None else layout.parameter_parts.tolist()
    for number, (parameter, count, holders) in enumerate(zip(graph.parameters, pieces, blocks.of_parameter, strict=True)):
        own = shares(_state_bytes(parameter), count)[:, None]
        parts[:, list(holders)] += own
        if number in spread:
            experts[:, list(holders)] += own
    turns = np.zeros((2, len(blocks.names)))
    whole = (graph.op_phase == UPDATE) & (np.array(graph.op_kind) == "gemm")  # products of whole matrices, in bfloat16
    for number in np.unique(graph.op_parameter[whole]).tolist():
        if layout is None or pieces[number] > 1:
            turns[:, list(blocks.of_parameter[number])] += [[1.0], [2.0 * math.prod(graph.parameters[number].shape)]]
    return HeldCosts(parts[0].copy(), parts[1].copy(), parts[2].copy(), experts, turns, released=released)


def ties_of(graph: OpGraph, blocks: Blocks) -> tuple[Tie, ...]:
    """Returns shared weights, those of the same blocks as one."""
    sizes: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for parameter, holders in zip(graph.parameters, blocks.of_parameter, strict=True):
        if len(holders) > 1:
            sizes[holders] = sizes.get(holders, 0) + _state_bytes(parameter)
    return tuple(Tie(holders, *map(int, total)) for holders, total in sizes.items())


def _state_bytes(parameter: Parameter) -> NDArray[np.int64]:
    """Returns bytes of a parameter, its gradient and its optimizer state."""
    return np.array([parameter.size_bytes, parameter.gradient_bytes, parameter.optimizer_bytes], dtype=np.int64)
