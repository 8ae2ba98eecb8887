"""rlplace inside other tools: transformers' Trainer and accelerate (docs/plugins.md).

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplace.integrations.device_maps import complete_device_map, plan_from_device_map

_PUBLIC = {
    "complete_device_map": "rlplace.integrations.device_maps:complete_device_map",
    "plan_from_device_map": "rlplace.integrations.device_maps:plan_from_device_map",
}

__all__ = ["complete_device_map", "plan_from_device_map"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rlplace.integrations' has no attribute {name!r}")
    module, attribute = _PUBLIC[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
