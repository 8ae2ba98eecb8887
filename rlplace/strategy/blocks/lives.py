"""What lives in memory during a pass: which tensors wait for the backward, and what forward and backward hold for a moment.

All blocks run one after another on one device, forward, then backward, ops of a block in the order of the capture; where ops
run again, they do so when the gradient has arrived, before the block's backward. A tensor lives from its op to its last reader,
as the executor counts it (views read nothing; gradients of weights and what a device is given from outside are held all the
time). What lives depends on the structure of the graph alone, how many bytes on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import FORWARD, GRADIENT, INPUT, PARAMETER, UPDATE, OpGraph
from rlplace.strategy.blocks.blocks import Blocks
from rlplace.strategy.costs import NONE, RECOMPUTE, SELECTIVE

_SELECTED = ("gemm", "conv", "attention")
"""Kinds of ops whose outputs selective recomputation keeps; batched products are kept where they read a weight."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of B blocks: the fields of `rlplace.strategy.costs.PassCosts`."""

    kept_bytes: NDArray[np.int64]
    working_bytes: NDArray[np.int64]
    sent_bytes: NDArray[np.int64]
    returned_bytes: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Timeline:
    """What lives when, with one choice of recomputation for all blocks.

    Positions are those of a list of ops: the forward of block 0 to B - 1, then the backward of block B - 1 to 0, every one of
    these 2 B segments after an empty place.

    Attributes:
        op: int64 [S], the op at each position, -1 for the empty places.
        segments: int64 [2, B], position where forward and backward of a block start.
        tensor, start, end: int64 [I], tensors and the positions from and to which they live.
        kept: int64 [I], the block that keeps it for the backward, -1 for none.
        again: int64, ops that run again.
    """

    op: NDArray[np.int64]
    segments: NDArray[np.int64]
    tensor: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    kept: NDArray[np.int64]
    again: NDArray[np.int64]


class Lives:
    """Lifetimes of the tensors of a captured step of B blocks.

    Attributes:
        again: Per choice of recomputation the ops that run again, int64 each.
    """

    def __init__(self, graph: OpGraph, blocks: Blocks) -> None:
        self._count = len(blocks.names)
        tensor, reader = graph.edge_tensor.astype(np.int64), graph.consumers.astype(np.int64)
        producer = graph.tensor_producer.astype(np.int64)
        inside = (producer[tensor] >= 0) & (graph.op_phase[reader] != UPDATE)
        self._borders = _borders(graph, blocks, tensor[inside], reader[inside])
        self._inputs = model_inputs(graph, blocks.of_op)
        self._weightless = graph.tensor_role != GRADIENT
        inside &= ~plain_views(graph)[reader]
        timelines = [_Events(graph, blocks, tensor[inside], reader[inside], how).timeline() for how in range(len(RECOMPUTE))]
        self._timelines = timelines
        self.again = tuple(timeline.again for timeline in timelines)

    def memory(self, tensor_bytes: NDArray[np.int64], temporary_bytes: NDArray[np.int64]) -> Memory:
        """In bytes, at any batch size and cut.

        Args:
            tensor_bytes: int64 [T].
            temporary_bytes: int64 [N], of ops.
        """
        size = np.where(self._weightless, tensor_bytes, 0)
        inputs = np.bincount(self._inputs[1], tensor_bytes[self._inputs[0]], self._count).astype(np.int64)
        kept, working = [], []
        for timeline in self._timelines:
            waiting = timeline.kept >= 0
            held = np.bincount(timeline.kept[waiting], size[timeline.tensor[waiting]], self._count).astype(np.int64)
            before = np.cumsum(held)
            forward, backward = np.maximum(_peaks(timeline, size, temporary_bytes) - before, 0)
            border = _arriving(timeline, self._borders[1], size)
            at_end = np.maximum(_peaks(timeline, size, temporary_bytes, -border)[1] - before, 0)
            grown = np.where(self._weightless, 0, tensor_bytes)
            growing = np.maximum(_peaks(timeline, size, temporary_bytes, _growing(timeline, grown))[1] - before, 0)
            working.append(np.stack([forward, backward, at_end, growing]))
            kept.append(held + inputs)
        sent, returned = (
            np.cumsum(
                np.bincount(first, tensor_bytes[tensor], self._count) - np.bincount(last, tensor_bytes[tensor], self._count)
            ).astype(np.int64)
            for tensor, first, last in self._borders
        )
        return Memory(np.stack(kept), np.stack(working, axis=1), sent, returned)


def _peaks(
    timeline: _Timeline, size: NDArray[np.int64], temporary: NDArray[np.int64], beside: NDArray[np.float64] | float = 0.0
) -> NDArray[np.int64]:
    """Returns int64 [2, B], the most that lives during forward and backward of every block, and beside it at each position."""
    live = _living(timeline, timeline.start, timeline.end + 1, size[timeline.tensor]) + beside
    live += np.where(timeline.op >= 0, temporary[timeline.op], 0)
    order = np.argsort(timeline.segments, axis=None)
    peaks = np.zeros(timeline.segments.size, dtype=np.int64)
    peaks[order] = np.maximum.reduceat(live, timeline.segments.ravel()[order])
    return peaks.reshape(timeline.segments.shape)


def _living(
    timeline: _Timeline, start: NDArray[np.int64], stop: NDArray[np.int64], size: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns float64 [S], bytes of tensors from the position at which each starts to the one before it stops."""
    length = len(timeline.op) + 1
    found: NDArray[np.float64] = np.cumsum(np.bincount(start, size, length) - np.bincount(stop, size, length))[:-1]
    return found


def _arriving(timeline: _Timeline, returned: tuple[NDArray[np.int64], ...], size: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns float64 [S], gradients that later blocks have made, while earlier blocks run."""
    tensor, _, home = returned
    end = np.zeros(len(size), dtype=np.int64)
    end[timeline.tensor] = timeline.end
    return _living(timeline, timeline.segments[1, home - 1], end[tensor] + 1, size[tensor])


def _growing(timeline: _Timeline, size: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns float64 [S], gradients of weights from the op that makes them to the end of its block."""
    stops = np.append(np.sort(timeline.segments, axis=None), len(timeline.op))
    own = size[timeline.tensor] > 0
    start = timeline.start[own]
    return _living(timeline, start, stops[np.searchsorted(stops, start, side="right")], size[timeline.tensor[own]])


class _Events:
    """Lists ops and lifetimes for one choice of recomputation."""

    def __init__(self, graph: OpGraph, blocks: Blocks, tensor: NDArray[np.int64], reader: NDArray[np.int64], how: int) -> None:
        self.block, self.count = blocks.of_op.astype(np.int64), len(blocks.names)
        self.tensor, self.reader, self.producer = tensor, reader, graph.tensor_producer.astype(np.int64)
        self.phase = graph.op_phase
        self.forward = graph.op_phase == FORWARD
        self.cached = self.forward & selected(graph) & (how == SELECTIVE)
        self.again = np.zeros(graph.num_ops, dtype=bool) if how == NONE else self._again(self.cached)

    def _again(self, keeps: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Marks the forward ops that the backward of their own block needs, directly or through one another."""
        maker = self.producer[self.tensor]
        own = self.forward[maker] & (self.block[maker] == self.block[self.reader]) & ~keeps[maker]
        makers, readers = maker[own], self.reader[own]
        needed = np.zeros(len(self.block), dtype=bool)
        needed[makers[~self.forward[readers]]] = True
        order = np.argsort(-makers, kind="stable")  # readers come after what they read
        for maker_of, reader_of in zip(makers[order].tolist(), readers[order].tolist(), strict=True):
            if needed[reader_of] and self.forward[reader_of]:
                needed[maker_of] = True
        return needed

    def timeline(self) -> _Timeline:
        ops, segments = self._positions()
        first, again = self._place(ops)
        count = len(self.producer)
        maker = self.producer[self.tensor]
        made_again = self.again[maker]
        own = (self.block[maker] == self.block[self.reader]) & self.forward[maker]
        behind = ~self.forward[self.reader]
        # Readers of the first copy of a tensor, and of the one that is made again.
        uses = [(self.tensor[~(own & behind & made_again)], first[self.reader[~(own & behind & made_again)]])]
        repeated = self.again[self.reader] & ~(own & made_again)
        uses.append((self.tensor[repeated], again[self.reader[repeated]]))
        second = own & made_again & (behind | self.again[self.reader])
        late = np.where(behind, first[self.reader], again[self.reader])[second]
        made = np.flatnonzero((self.producer >= 0) & (self.phase[np.maximum(self.producer, 0)] != UPDATE))
        start = first[self.producer[made]]
        end = np.full(count, -1, dtype=np.int64)
        end[made] = start
        for tensor, position in uses:
            np.maximum.at(end, tensor, position)
        cached = made[self.cached[self.producer[made]]]  # until the block runs again
        end[cached] = np.maximum(end[cached], segments[1, self.block[self.producer[cached]]])
        turn = int(segments[1].min())
        kept = np.where((end >= turn) & self.forward[np.maximum(self.producer, 0)], self._keeper(repeated), -1)[made]
        twice = made[self.again[self.producer[made]]]
        end_again = np.full(count, -1, dtype=np.int64)
        end_again[twice] = again[self.producer[twice]]
        np.maximum.at(end_again, self.tensor[second], late)
        return _Timeline(
            op=ops,
            segments=segments,
            tensor=np.concatenate([made, twice]),
            start=np.concatenate([start, again[self.producer[twice]]]),
            end=np.concatenate([end[made], end_again[twice]]),
            kept=np.concatenate([kept, np.full(len(twice), -1)]),
            again=np.flatnonzero(self.again),
        )

    def _keeper(self, repeated: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the block that keeps each tensor for the backward: its own, or the other one that alone wants it, to run
        again.
        """
        maker = np.maximum(self.producer, 0)
        owner = self.block[maker]
        wanted = np.zeros(len(self.producer), dtype=bool)
        maker_block = self.block[self.producer[self.tensor]]
        own_again = self.again[self.producer[self.tensor]] & (maker_block == self.block[self.reader])
        wanted[self.tensor[~self.forward[self.reader] & ~own_again]] = True
        wanted |= self.cached[maker]
        inside = repeated & (maker_block == self.block[self.reader])
        wanted[self.tensor[inside]] = True
        first, last = np.full(len(self.producer), self.count, dtype=np.int64), np.full(len(self.producer), -1, dtype=np.int64)
        np.minimum.at(first, self.tensor[repeated], self.block[self.reader[repeated]])
        np.maximum.at(last, self.tensor[repeated], self.block[self.reader[repeated]])
        return np.where(wanted | (first != last), owner, first)

    def _positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns ops by position, and where segments start."""
        numbers = np.arange(len(self.block))
        ahead = numbers[self.forward]
        repeated = np.flatnonzero(self.again)
        behind = numbers[~self.forward & (self.phase != UPDATE)]
        last = 2 * self.count - 1
        empty = np.arange(2 * self.count)
        segment = np.concatenate([empty, self.block[ahead], last - self.block[repeated], last - self.block[behind]])
        part = np.repeat([0, 1, 2, 3], [len(empty), len(ahead), len(repeated), len(behind)])
        ops = np.concatenate([np.full(len(empty), -1), ahead, repeated, behind])
        order = np.lexsort((ops, part, segment))
        starts = np.searchsorted(segment[order], empty)
        self._part = part[order]
        return ops[order], np.stack([starts[: self.count], starts[self.count :][::-1]])

    def _place(self, ops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns position of every op, and of its second run; -1 for none."""
        first, again = np.full((2, len(self.block)), -1, dtype=np.int64)
        position = np.arange(len(ops))
        for place, parts in ((first, (1, 3)), (again, (2,))):
            here = np.isin(self._part, parts)
            place[ops[here]] = position[here]
        return first, again


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


def model_inputs(graph: OpGraph, block: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns inputs of the model, and the blocks that read them first, where `block` is that of every op."""
    tensors = np.flatnonzero((graph.tensor_role == INPUT) & (np.diff(graph.consumer_ptr) > 0))
    return tensors, block[graph.consumers[graph.consumer_ptr[tensors]]].astype(np.int64)


def _borders(
    graph: OpGraph, blocks: Blocks, tensor: NDArray[np.int64], reader: NDArray[np.int64]
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], ...]:
    """Returns tensors that cross borders forward, and gradients that cross them back: number, first border, and one past the
    last.
    """
    home = np.where(graph.tensor_producer >= 0, blocks.of_op[np.maximum(graph.tensor_producer, 0)], -1).astype(np.int64)
    ahead = graph.op_phase[np.maximum(graph.tensor_producer, 0)] == FORWARD
    furthest, nearest = home.copy(), home.copy()
    np.maximum.at(furthest, tensor, blocks.of_op[reader])
    np.minimum.at(nearest, tensor, blocks.of_op[reader])
    sent = np.flatnonzero(ahead & (furthest > home))
    returned = np.flatnonzero(~ahead & (nearest < home) & (graph.tensor_role != GRADIENT))
    return (sent, home[sent], furthest[sent]), (returned, nearest[returned], home[returned])
