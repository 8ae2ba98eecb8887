"""rlplace inside other tools: device maps, transformers' Trainer and accelerate (docs/plugins.md)."""

from rlplace.integrations.device_maps import complete_device_map, plan_from_device_map

__all__ = ["complete_device_map", "plan_from_device_map"]
