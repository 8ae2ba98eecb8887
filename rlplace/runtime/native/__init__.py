"""Whole strategies run by torch's own parts: what every axis, level and schedule of a strategy means in torch's terms."""

from __future__ import annotations

from typing import Any

_HOME = {"prepare": "run", "examine": "facts", "ModelFacts": "why_not"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
