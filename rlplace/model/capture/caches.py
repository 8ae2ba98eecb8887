"""Caches of keys and values, which models of transformers fill by default and no training step reads.

A cache is an object that every block writes: it crosses no border between stages, and recomputation would fill it twice. So
captures run without caches, and so does a distributed model, as under transformers' own gradient checkpointing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def caching(model: nn.Module) -> list[Any]:
    """Returns configurations of transformers in a model's modules that ask for a cache."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PretrainedConfig

    configs = {id(config): config for config in (vars(module).get("config") for module in model.modules())}
    return [one for one in configs.values() if isinstance(one, PretrainedConfig) and getattr(one, "use_cache", None) is True]


def turn_off_caches(model: nn.Module) -> None:
    """Sets ``use_cache = False`` in the configurations of a model's modules."""
    for config in caching(model):
        config.use_cache = False


@contextlib.contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Turns caches off inside of the context; the model is as before afterwards."""
    configs = caching(model)
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True
