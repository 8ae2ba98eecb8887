"""Caches of keys and values, which models of transformers fill by default and no training step reads.

A cache is an object that every block writes: it crosses no border between stages, and recomputation would fill it twice. So
captures run without caches, and so does a distributed model, as under transformers' own gradient checkpointing.

Caches of functions (`functools.lru_cache`) may hold constants of a model; captures leave none of their fake tensors in them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
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


def cached_functions(model: nn.Module) -> frozenset[Any]:
    """Returns functions with an ``lru_cache`` among those of a model's classes and of the files that define them."""
    every = {base for module in model.modules() for base in type(module).__mro__}
    classes = [one for one in every if one.__module__.partition(".")[0] not in ("torch", "builtins")]
    names = {one.__module__ for one in classes}
    defined = (value for name in names if name in sys.modules for value in vars(sys.modules[name]).values())
    values = [value for value in defined if getattr(value, "__module__", None) in names]  # the rest is imported there
    values += [value for one in classes for value in vars(one).values()]
    functions = [getattr(value, "__func__", value) for value in values]  # of class and static methods
    cells = [cell for function in functions for cell in getattr(function, "__closure__", None) or ()]
    inner = [cell.cell_contents for cell in cells if _is_filled(cell)]  # of decorators that call a cached function
    return frozenset(one for one in (*functions, *inner) if isinstance(one, functools._lru_cache_wrapper))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a function that is not defined yet
        return False


def empty(functions: Iterable[Any]) -> None:
    """Empties the caches of functions."""
    for function in functions:
        function.cache_clear()
