"""One block of every class, at any batch size and cut: what is priced in place of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import FORWARD, OpGraph
from rlplace.model.graph.part import part_of
from rlplace.model.graph.rescale import rescale
from rlplace.strategy.blocks.blocks import Blocks
from rlplace.strategy.layouts.divide import divided
from rlplace.strategy.layouts.tensor_layout import TensorLayout


@dataclass(frozen=True, eq=False)
class Sample:
    """The ops of some blocks, which stand for those of all M ops of a graph that is known at one or two batch sizes.

    Attributes:
        graphs: Those ops, at each of these batch sizes.
        captured: int64 [N'], which op of the captured graph each of them is (a part of).
        tensors: int64 [T'], likewise; numbers past the captured tensors carry no bytes.
        stand_in: int64 [M], which of them stands for each op.
    """

    graphs: tuple[OpGraph, ...]
    captured: NDArray[np.int64]
    tensors: NDArray[np.int64]
    stand_in: NDArray[np.int64]

    @staticmethod
    def of(
        graphs: Sequence[OpGraph], blocks: Blocks, first: NDArray[np.int64], origin: NDArray[np.int32] | None = None
    ) -> Sample:
        """The ops of blocks that stand for others.

        Args:
            graphs: Of M ops.
            blocks: Of the captured graph.
            first: int64 [B], the block that stands for each block; its ops are the same, in the same order.
            origin: int32 [M], which captured op each op is a part of; None: they are the captured ones.
        """
        origin = np.arange(graphs[0].num_ops, dtype=np.int32) if origin is None else origin
        block = blocks.of_op[origin]
        by_block = np.argsort(block, kind="stable")
        start = np.searchsorted(block[by_block], np.arange(len(first) + 1))
        place = np.empty(len(block), dtype=np.int64)  # within its block
        place[by_block] = np.arange(len(block)) - start[block[by_block]]
        ops = np.flatnonzero(first[block] == block)
        parts = [part_of(graph, ops) for graph in graphs]
        stand_in = np.searchsorted(ops, by_block[start[first[block]] + place])
        return Sample(tuple(graph for graph, _ in parts), origin[ops].astype(np.int64), parts[0][1], stand_in)

    def at(self, samples: int, layouts: Sequence[TensorLayout], parts: Sequence[NDArray[np.int64]]) -> OpGraph:
        """The ops at a batch size, as one device of its groups runs them; each layout with its parts of tensors."""
        known = {graph.samples: graph for graph in self.graphs}
        graph = known[samples] if samples in known else rescale(self.graphs[0], self.graphs[1], samples)
        for layout, parts_of_tensor in zip(layouts, parts, strict=True):
            padded = np.append(parts_of_tensor, 1)
            graph = divided(graph, layout, self.captured, padded[np.minimum(self.tensors, len(parts_of_tensor))])
        return graph


def representatives(
    graph: OpGraph, blocks: Blocks, classes: NDArray[np.int64], layouts: Sequence[TensorLayout]
) -> NDArray[np.int64]:
    """int64 [B], the first block of the same class whose ops are cut in the same way."""
    parts = np.stack([np.ones(graph.num_ops, dtype=np.int32), *(layout.op_parts for layout in layouts)])
    inside = graph.op_phase == FORWARD
    first: dict[tuple[int, bytes], int] = {}
    ways = [parts[:, inside & (blocks.of_op == block)].tobytes() for block in range(len(blocks.names))]
    return np.array([first.setdefault((int(classes[b]), way), b) for b, way in enumerate(ways)], dtype=np.int64)
