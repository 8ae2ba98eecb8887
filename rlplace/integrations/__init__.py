"""rlplace inside other tools: torch.compile, torch pipelining, torchtitan, the Trainer of transformers (docs/plugins.md).

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplace.integrations.device_maps import complete_device_map, plan_from_device_map
    from rlplace.integrations.dynamo import rlplace as dynamo_backend
    from rlplace.integrations.stages import StageSplit, split_points, split_spec
    from rlplace.runtime.step_watch_trainer import StepWatchCallback

_PUBLIC = {
    "StageSplit": "rlplace.integrations.stages:StageSplit",
    "StepWatchCallback": "rlplace.runtime.step_watch_trainer:StepWatchCallback",
    "complete_device_map": "rlplace.integrations.device_maps:complete_device_map",
    "dynamo_backend": "rlplace.integrations.dynamo:rlplace",
    "plan_from_device_map": "rlplace.integrations.device_maps:plan_from_device_map",
    "split_points": "rlplace.integrations.stages:split_points",
    "split_spec": "rlplace.integrations.stages:split_spec",
}

__all__ = [
    "StageSplit",
    "StepWatchCallback",
    "complete_device_map",
    "dynamo_backend",
    "plan_from_device_map",
    "split_points",
    "split_spec",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rlplace.integrations' has no attribute {name!r}")
    module, attribute = _PUBLIC[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
