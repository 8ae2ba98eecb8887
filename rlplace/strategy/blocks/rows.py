"""Blocks that are alike are priced once: the ops of one block of each kind represent those of all."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import OpGraph


class PricedRows(NamedTuple):
    """The ops that are priced, R of N.

    Attributes:
        ops: int64 [R], in order.
        row: int64 [N], the index into `ops` of the op that represents each.
    """

    ops: NDArray[np.int64]
    row: NDArray[np.int64]


def every_op(count: int) -> PricedRows:
    """Returns all of so many ops."""
    return PricedRows(np.arange(count), np.arange(count))


def rows_of_blocks(of_op: NDArray[Any], first: NDArray[np.int64]) -> PricedRows:
    """Returns the ops of one block of each kind.

    Args:
        of_op: int [N], the block of every op.
        first: int64 [B], the block that represents each; it has the same ops in the same order.
    """
    order = np.argsort(of_op, kind="stable")
    start = np.searchsorted(of_op[order], np.arange(len(first) + 1))
    position = np.empty(len(of_op), dtype=np.int64)
    position[order] = np.arange(len(of_op)) - start[of_op[order]]
    priced = order[start[first[of_op]] + position]
    ops, row = np.unique(priced, return_inverse=True)
    return PricedRows(ops, row.reshape(-1))


def graph_of_rows(graph: OpGraph, ops: NDArray[np.int64]) -> OpGraph:
    """Returns a graph of some ops, among them the forward op of each, and of all tensors, for pricing alone.

    What other ops make or read has no producer, or fewer consumers.
    """
    number = np.full(graph.num_ops + 1, -1, dtype=np.int32)  # the last entry stays -1, for ops without a forward op
    number[ops] = np.arange(len(ops), dtype=np.int32)
    chosen, kept = ops.tolist(), number[graph.consumers] >= 0
    count = np.concatenate([[0], np.cumsum(kept)])
    picked: dict[str, Any] = {name: tuple(getattr(graph, name)[op] for op in chosen) for name in _NAMES}
    picked |= {name: getattr(graph, name)[ops] for name in _ARRAYS}
    return dataclasses.replace(
        graph,
        **picked,
        op_forward=number[graph.op_forward[ops]],
        op_launches=None if graph.op_launches is None else graph.op_launches[ops],
        op_dims={int(number[op]): dims for op, dims in graph.op_dims.items() if number[op] >= 0},
        tensor_producer=number[graph.tensor_producer],
        consumers=number[graph.consumers[kept]],
        consumer_ptr=count[graph.consumer_ptr],
        traced=None,
    )


_NAMES = ("op_names", "op_target", "op_kind", "op_module", "op_dtype")
_ARRAYS = ("op_phase", "op_parameter", "op_flops", "op_bytes", "op_temporary_bytes", "op_colocate")
