"""Lifetimes of tensors in a pass: those kept for the backward, and the peaks of forward and backward.

All blocks run one after another on one device, forward, then backward, ops of a block in the order of the capture;
recomputation comes when the gradient has arrived, before the block's backward. A tensor lives from its op to its last reader,
as the executor counts it (views read nothing; gradients of weights and inputs of the model are held all the time). Lifetimes
depend on the structure of the graph alone, bytes on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import FORWARD, GRADIENT, INPUT, PARAMETER, UPDATE, OpGraph
from rlplace.strategy.blocks.blocks import Blocks
from rlplace.strategy.costs import NONE, RECOMPUTE, SELECTIVE, Bytes, Floats

Ints = NDArray[np.int64]

_SELECTED = ("gemm", "conv", "attention")
"""Kinds of ops whose outputs selective recomputation keeps; batched products are kept where they read a weight."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of B blocks: the fields of `rlplace.strategy.costs.BlockPassCosts`."""

    kept_bytes: Bytes
    working_bytes: Bytes
    sent_bytes: Bytes
    returned_bytes: Bytes


@dataclass(frozen=True, eq=False)
class _Timeline:
    """Lifetimes with one choice of recomputation for all blocks.

    Positions are those of a list of ops: the forward of block 0 to B - 1, then the backward of block B - 1 to 0, every one of
    these 2 B segments after an empty place.

    Attributes:
        op: int64 [S], the op at each position, -1 for the empty places.
        segments: int64 [2, B], position where forward and backward of a block start.
        tensor, start, end: int64 [I], tensors and the positions from and to which they live.
        kept: int64 [I], the block that keeps it for the backward, -1 for none.
        again: int64, recomputed ops.
    """

    op: Ints
    segments: Ints
    tensor: Ints
    start: Ints
    end: Ints
    kept: Ints
    again: Ints

    def living(self, start: Ints, stop: Ints, size: Ints) -> Floats:
        """Returns float64 [S], bytes of tensors from the position at which each starts to the one before it stops."""
        length = len(self.op) + 1
        found: Floats = np.cumsum(np.bincount(start, size, length) - np.bincount(stop, size, length))[:-1]
        return found

    def peaks(self, size: Ints, temporary: Ints, beside: Floats | float = 0.0) -> Ints:
        """Returns int64 [2, B], peaks of forward and backward of every block; `beside` is added at each position."""
        live = self.living(self.start, self.end + 1, size[self.tensor]) + beside
        live += np.where(self.op >= 0, temporary[self.op], 0)
        order = np.argsort(self.segments, axis=None)
        peaks = np.zeros(self.segments.size, dtype=np.int64)
        peaks[order] = np.maximum.reduceat(live, self.segments.ravel()[order])
        return peaks.reshape(self.segments.shape)

    def arriving(self, returned: tuple[Ints, ...], size: Ints) -> Floats:
        """Returns float64 [S], gradients that later blocks have made, while earlier blocks run."""
        tensor, _, home = returned
        end = np.zeros(len(size), dtype=np.int64)
        end[self.tensor] = self.end
        return self.living(self.segments[1, home - 1], end[tensor] + 1, size[tensor])

    def growing(self, size: Ints) -> Floats:
        """Returns float64 [S], gradients of weights from the op that makes them to the end of its block."""
        stops = np.append(np.sort(self.segments, axis=None), len(self.op))
        own = size[self.tensor] > 0
        start = self.start[own]
        return self.living(start, stops[np.searchsorted(stops, start, side="right")], size[self.tensor[own]])


class Lives:
    """Lifetimes of the tensors of a captured step of B blocks.

    Attributes:
        again: Per choice of recomputation the recomputed ops, int64 each.
    """

    def __init__(self, graph: OpGraph, blocks: Blocks) -> None:
        self._count = len(blocks.names)
        tensor, reader = graph.edge_tensor.astype(np.int64), graph.consumers.astype(np.int64)
        inside = (graph.tensor_producer[tensor] >= 0) & (graph.op_phase[reader] != UPDATE)
        self._borders = _borders(graph, blocks, tensor[inside], reader[inside])
        self._inputs = model_inputs(graph, blocks.of_op)
        self._weightless = graph.tensor_role != GRADIENT
        inside &= ~plain_views(graph)[reader]
        self._timelines = [
            _Events(graph, blocks, tensor[inside], reader[inside], how).timeline() for how in range(len(RECOMPUTE))
        ]
        self.again = tuple(timeline.again for timeline in self._timelines)

    def memory(self, tensor_bytes: Bytes, temporary_bytes: Bytes) -> Memory:
        """Returns bytes at any batch size and cut, from those of tensors, int64 [T], and temporaries of ops, int64 [N]."""
        size, grown = (np.where(role, tensor_bytes, 0) for role in (self._weightless, ~self._weightless))
        inputs = np.bincount(self._inputs[1], tensor_bytes[self._inputs[0]], self._count).astype(np.int64)
        kept, working = [], []
        for timeline in self._timelines:
            waiting = timeline.kept >= 0
            held = np.bincount(timeline.kept[waiting], size[timeline.tensor[waiting]], self._count).astype(np.int64)
            border, growing = timeline.arriving(self._borders[1], size), timeline.growing(grown)
            forward, backward = timeline.peaks(size, temporary_bytes)
            at_end, with_gradients = (timeline.peaks(size, temporary_bytes, beside)[1] for beside in (-border, growing))
            working.append(np.maximum(np.stack([forward, backward, at_end, with_gradients]) - np.cumsum(held), 0))
            kept.append(held + inputs)
        sent, returned = (
            np.cumsum(
                np.bincount(first, tensor_bytes[tensor], self._count) - np.bincount(last, tensor_bytes[tensor], self._count)
            ).astype(np.int64)
            for tensor, first, last in self._borders
        )
        return Memory(np.stack(kept), np.stack(working, axis=1), sent, returned)


class _Events:
    """Ops and lifetimes for one choice of recomputation."""

    def __init__(self, graph: OpGraph, blocks: Blocks, tensor: Ints, reader: Ints, how: int) -> None:
        self.block, self.count = blocks.of_op.astype(np.int64), len(blocks.names)
        self.tensor, self.reader, self.producer = tensor, reader, graph.tensor_producer.astype(np.int64)
        self.phase, self.forward = graph.op_phase, graph.op_phase == FORWARD
        self.maker = self.producer[tensor]
        self.inside = self.block[self.maker] == self.block[reader]
        self.cached = self.forward & selected(graph) & (how == SELECTIVE)
        self.again = np.zeros(graph.num_ops, dtype=bool) if how == NONE else self._again()

    def _again(self) -> NDArray[np.bool_]:
        """Marks the forward ops that the backward of their own block needs, directly or through one another."""
        own = self.forward[self.maker] & self.inside & ~self.cached[self.maker]
        makers, readers = self.maker[own], self.reader[own]
        needed = np.zeros(len(self.block), dtype=bool)
        needed[makers[~self.forward[readers]]] = True
        order = np.argsort(-makers, kind="stable")  # readers come after what they read
        for maker_of, reader_of in zip(makers[order].tolist(), readers[order].tolist(), strict=True):
            if needed[reader_of] and self.forward[reader_of]:
                needed[maker_of] = True
        return needed

    def timeline(self) -> _Timeline:
        """Returns all lifetimes."""
        ops, segments, first, again = self._positions()
        remade = self.inside & self.forward[self.maker] & self.again[self.maker]
        behind, repeats = ~self.forward[self.reader], self.again[self.reader]
        plain, repeated, second = ~(remade & behind), repeats & ~remade, remade & (behind | repeats)
        made = np.flatnonzero((self.producer >= 0) & (self.phase[np.maximum(self.producer, 0)] != UPDATE))
        twice = made[self.again[self.producer[made]]]
        start, start_again = first[self.producer[made]], again[self.producer[twice]]
        end, end_again = np.full((2, len(self.producer)), -1, dtype=np.int64)
        end[made], end_again[twice] = start, start_again
        np.maximum.at(end, self.tensor[plain], first[self.reader[plain]])
        np.maximum.at(end, self.tensor[repeated], again[self.reader[repeated]])
        np.maximum.at(end_again, self.tensor[second], np.where(behind, first[self.reader], again[self.reader])[second])
        cached = made[self.cached[self.producer[made]]]  # until the block runs again
        end[cached] = np.maximum(end[cached], segments[1, self.block[self.producer[cached]]])
        waits = (end >= segments[1].min()) & self.forward[np.maximum(self.producer, 0)]
        return _Timeline(
            op=ops,
            segments=segments,
            tensor=np.concatenate([made, twice]),
            start=np.concatenate([start, start_again]),
            end=np.concatenate([end[made], end_again[twice]]),
            kept=np.concatenate([np.where(waits, self._keeper(repeated), -1)[made], np.full(len(twice), -1)]),
            again=np.flatnonzero(self.again),
        )

    def _keeper(self, repeated: NDArray[np.bool_]) -> Ints:
        """Returns the block that keeps each tensor: the producer, or its only consumer if that one is recomputed."""
        maker, size = np.maximum(self.producer, 0), len(self.producer)
        wanted = self.cached[maker]
        wanted[self.tensor[~self.forward[self.reader] & ~(self.again[self.maker] & self.inside)]] = True
        wanted[self.tensor[repeated & self.inside]] = True
        first, last = np.full(size, self.count, dtype=np.int64), np.full(size, -1, dtype=np.int64)
        np.minimum.at(first, self.tensor[repeated], self.block[self.reader[repeated]])
        np.maximum.at(last, self.tensor[repeated], self.block[self.reader[repeated]])
        return np.where(wanted | (first != last), self.block[maker], first)

    def _positions(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Returns ops by position, where segments start, and the position of every op and of its second run, -1 for none."""
        ahead, repeated = np.flatnonzero(self.forward), np.flatnonzero(self.again)
        behind = np.flatnonzero(~self.forward & (self.phase != UPDATE))
        last, empty = 2 * self.count - 1, np.arange(2 * self.count)
        segment = np.concatenate([empty, self.block[ahead], last - self.block[repeated], last - self.block[behind]])
        part = np.repeat([0, 1, 2, 3], [len(empty), len(ahead), len(repeated), len(behind)])
        ops = np.concatenate([np.full(len(empty), -1), ahead, repeated, behind])
        order = np.lexsort((ops, part, segment))
        ops, part, starts = ops[order], part[order], np.searchsorted(segment[order], empty)
        first, again = np.full((2, len(self.block)), -1, dtype=np.int64)
        for place, here in ((first, part % 2 == 1), (again, part == 2)):
            place[ops[here]] = np.flatnonzero(here)
        return ops, np.stack([starts[: self.count], starts[self.count :][::-1]]), first, again


def selected(graph: OpGraph) -> NDArray[np.bool_]:
    """Marks [N] weight products and attention."""
    kind = np.array(graph.op_kind)
    reads_weight = np.isin(np.arange(graph.num_ops), graph.consumers[graph.tensor_role[graph.edge_tensor] == PARAMETER])
    selected: NDArray[np.bool_] = np.isin(kind, _SELECTED) | ((kind == "bmm") & reads_weight)
    return selected


def plain_views(graph: OpGraph) -> NDArray[np.bool_]:
    """Marks [N] the views that make no storage of their own and so keep none of their inputs."""
    view = np.array([kind == "view" for kind in graph.op_kind], dtype=bool)
    view[graph.tensor_producer[(graph.tensor_producer >= 0) & (graph.tensor_bytes > 0)]] = False
    return view


def model_inputs(graph: OpGraph, block: NDArray[Any]) -> tuple[Ints, Ints]:
    """Returns inputs of the model, and the blocks that read them first, where `block` is that of every op."""
    tensors = np.flatnonzero((graph.tensor_role == INPUT) & (np.diff(graph.consumer_ptr) > 0))
    return tensors, block[graph.consumers[graph.consumer_ptr[tensors]]].astype(np.int64)


def _borders(graph: OpGraph, blocks: Blocks, tensor: Ints, reader: Ints) -> tuple[tuple[Ints, Ints, Ints], ...]:
    """Returns tensors that cross borders forward, and gradients back: number, first border, and one past the last."""
    maker = np.maximum(graph.tensor_producer, 0)
    home = np.where(graph.tensor_producer >= 0, blocks.of_op[maker], -1).astype(np.int64)
    ahead = graph.op_phase[maker] == FORWARD
    furthest, nearest = home.copy(), home.copy()
    np.maximum.at(furthest, tensor, blocks.of_op[reader])
    np.minimum.at(nearest, tensor, blocks.of_op[reader])
    sent = np.flatnonzero(ahead & (furthest > home))
    returned = np.flatnonzero(~ahead & (nearest < home) & (graph.tensor_role != GRADIENT))
    return (sent, home[sent], furthest[sent]), (returned, nearest[returned], home[returned])
