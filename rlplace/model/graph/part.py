"""Part of a graph: some of its ops, with every tensor that they read or make."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import INPUT, OpGraph


def picked(graph: OpGraph, ops: NDArray[Any]) -> dict[str, Any]:
    """The fields that have an entry an op (sizes of named dimensions apart), of these ops."""
    names = (item.name for item in dataclasses.fields(graph) if item.name.startswith("op_") and item.name != "op_dims")
    fields = {name: values for name in names if (values := getattr(graph, name)) is not None}
    numbers = ops.tolist()
    return {key: tuple(row[op] for op in numbers) if isinstance(row, tuple) else row[ops] for key, row in fields.items()}


def part_of(graph: OpGraph, ops: NDArray[Any]) -> tuple[OpGraph, NDArray[np.int64]]:
    """The graph of some ops.

    Tensors that other ops make become inputs. All parameters stay listed; ops keep their names, sizes and dimensions.

    Args:
        graph: N ops, T tensors.
        ops: Ascending op numbers, with the forward op of every backward op.

    Returns:
        The graph, and int64 [T'], the tensor that each of its tensors is.
    """
    number = np.full(graph.num_ops, -1, dtype=np.int32)
    number[ops] = np.arange(len(ops), dtype=np.int32)
    producer = np.where(graph.tensor_producer >= 0, number[np.maximum(graph.tensor_producer, 0)], -1)
    inside = number[graph.consumers] >= 0
    readers = np.bincount(graph.edge_tensor[inside], minlength=graph.num_tensors)
    tensors = np.flatnonzero((producer >= 0) | (readers > 0))
    foreign = (producer < 0) & (graph.tensor_producer >= 0)
    changes = picked(graph, ops)
    changes["op_forward"] = np.where(changes["op_forward"] >= 0, number[changes["op_forward"]], -1).astype(np.int32)
    return dataclasses.replace(
        graph,
        **changes,
        op_dims={int(number[op]): dims for op, dims in graph.op_dims.items() if number[op] >= 0},
        tensor_role=np.where(foreign, INPUT, graph.tensor_role)[tensors].astype(np.int8),
        tensor_parameter=np.where(foreign, -1, graph.tensor_parameter)[tensors].astype(np.int32),
        tensor_producer=producer[tensors].astype(np.int32),
        tensor_bytes=graph.tensor_bytes[tensors],
        consumer_ptr=np.concatenate([[0], np.cumsum(readers[tensors])]).astype(np.int64),
        consumers=number[graph.consumers[inside]],
        traced=None,
    ), tensors
