"""Views that are no work: every device that reads one makes it from its base, so that bases travel and views do not."""

from __future__ import annotations

import torch
from torch import fx

_aten = torch.ops.aten
VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.expand.default,
    }
)
"""Views that keep all elements of their base."""


def is_view_node(node: fx.Node) -> bool:
    """Whether every reader makes the node for itself."""
    return node.op == "call_function" and node.target in VIEWS


def base_of(node: fx.Node) -> fx.Node:
    """The node that a chain of views starts from; the node itself when it is no view."""
    while is_view_node(node):
        node = node.args[0]  # type: ignore[assignment]
    return node
