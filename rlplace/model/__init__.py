"""The captured training step: record, capture, coarsening, file format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplace.model.graph.opgraph import OpGraph, Parameter

__all__ = ["OpGraph", "Parameter"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rlplace.model.graph import opgraph

        return getattr(opgraph, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
