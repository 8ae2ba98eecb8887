"""Attention ops that see earlier positions only, recognised by how their masks are computed.

Exported models carry a mask where the eager model passes `is_causal`, and a GPU's kernels skip the half that is masked.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlplace.model.graph.opgraph import FORWARD, PARAMETER, OpGraph

_COMPARES = ("aten.le.", "aten.lt.", "aten.ge.", "aten.gt.")
"""Ops that make a triangle from two runs of positions."""

_TRIANGLES = ("aten.tril.", "aten.triu.")

_MASKS = ("copy", "elementwise", "gather", "view", "reduction")
"""Kinds of ops that make masks from positions; weights play no part in it."""


def with_causal_attention(graph: OpGraph) -> OpGraph:
    """The graph with ``causal`` among the dimensions of attention ops whose mask compares positions with each other."""
    makers = graph.forward_inputs()
    # True: a triangle; False: made from positions alone, without one; None: anything else, such as activations.
    triangle: list[bool | None] = [None] * graph.num_ops
    weights = np.flatnonzero(graph.tensor_role == PARAMETER)
    read = set(graph.consumers[np.isin(graph.edge_tensor, weights)].tolist())
    marked: set[int] = set()
    for op, kind in enumerate(graph.op_kind):
        before = [triangle[maker] for maker in makers[op]]
        if kind == "attention" and graph.op_phase[op] == FORWARD and True in before:
            dims = graph.op_dims.get(op, {})
            if dims.get("queries", 0) == dims.get("keys", 1) and dims["queries"] > 1:
                marked.add(op)
        elif kind in _MASKS and op not in read and None not in before:
            target = graph.op_target[op]
            compares = target.startswith(_COMPARES) and len(set(makers[op])) == 2
            triangle[op] = True in before or compares or target.startswith(_TRIANGLES)
    if not marked:
        return graph
    marked_dims = {
        op: {**sizes, "causal": 1} if int(graph.op_forward[op]) in marked and graph.op_kind[op] == "attention" else sizes
        for op, sizes in graph.op_dims.items()
    }
    return dataclasses.replace(graph, op_dims=marked_dims)
