"""Which modules are blocks: the units that strategies speak of and that stay the model's own modules.

A block is an element of an outermost module list, a module that reads parameters of its own, or a leaf module with parameters
or buffers. Containers between the root and its blocks are no blocks; neither are leaf modules without any state outside of
lists, which are recorded as ops. A strategy may name larger modules: what it names stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from rlplace.errors import InputError, show
from rlplace.model.capture.export import lies_in
from rlplace.runtime.torch_adapter import BatchNorm, DropoutNd, NormBase

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_KEPT = (DropoutNd, NormBase)
"""Leaf modules that draw random numbers or keep statistics, with parameters or without."""


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Returns paths of a model's blocks, in the order of its modules."""
    return tuple(path for path, module in units(model) if any(True for _ in module.parameters()))


def units(model: nn.Module, named: Iterable[str] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yields path and module of everything that stays whole when the model is cut: its blocks, and random leaf modules.

    Args:
        model: The model.
        named: Paths that a strategy names as blocks; modules inside of them are no units of their own. Of a list of modules its
            elements are units.

    Raises:
        InputError: A named path is no module.
    """
    chosen = set(named)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in chosen:
        if not path or path not in modules:
            raise InputError(f"strategy: block {show(path)} is no module of {type(model).__name__}; see block_names(model)")
    chosen = {inner for path in chosen for inner in _callable(path, modules[path])}
    seen: set[int] = set()
    for path, module in _inside(model, "", chosen, isinstance(model, _LISTS)):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _callable(path: str, module: nn.Module) -> Iterator[str]:
    """Yields the path of a module, or those of the modules in a list, which has no forward of its own."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict):
        yield path
        return
    for name, child in module.named_children():
        yield from _callable(f"{path}.{name}", child)


def _inside(module: nn.Module, path: str, chosen: set[str], listed: bool) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        container, around = isinstance(child, _LISTS), any(one.startswith(f"{inner}.") for one in chosen)
        if inner in chosen or (not container and not around and (listed or _is_whole(child))):
            yield inner, child
        else:
            yield from _inside(child, inner, chosen, container)


def _is_whole(module: nn.Module) -> bool:
    """Returns whether it reads parameters of its own, or draws random numbers or keeps statistics."""
    return any(True for _ in module.parameters(recurse=False)) or isinstance(module, _KEPT)


def owner(path: str, blocks: Iterable[str]) -> str | None:
    """Returns the block that a module or parameter path lies in; the innermost where blocks are nested."""
    holding = [block for block in blocks if lies_in(path, block)]
    return max(holding, key=len, default=None)


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of parameters that are one tensor, for every such tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)


def has_batch_norm(model: nn.Module) -> bool:
    """Returns whether a module computes statistics over the samples of its process, or keeps running ones."""
    norms = (module for module in model.modules() if isinstance(module, NormBase) and not isinstance(module, nn.SyncBatchNorm))
    return any(isinstance(module, BatchNorm) or module.track_running_stats for module in norms)


def has_sync_norm(model: nn.Module) -> bool:
    """Returns whether a module computes statistics over all processes of the job."""
    return any(isinstance(module, nn.SyncBatchNorm) and module.process_group is None for module in model.modules())
