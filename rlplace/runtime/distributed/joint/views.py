"""Views that are no work: every device that reads one makes it from its base, so that bases travel and views do not."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

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


def as_made(node: fx.Node) -> Any:
    """The op that makes a view of a base which may lie otherwise in memory than it did when it was traced."""
    return _aten.reshape.default if node.target in (_aten.view.default, _aten._unsafe_view.default) else node.target


def results_of(node: fx.Node) -> list[fx.Node]:
    """The values that a run makes: the node's own, or its items."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items if items else [node]


def lay_out(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The value with the strides that tracing promised, unless those are of an expanded one."""
    expanded = any(step == 0 and size > 1 for step, size in zip(strides, value.shape, strict=True))
    if value.stride() == tuple(strides) or expanded:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
