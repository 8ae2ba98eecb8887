"""Values of parameters for processes that keep parts of them: made later, or read from safetensors or torch's checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from rlplace.errors import InputError
from rlplace.runtime.state.untrusted import IndexReader
from rlplace.runtime.state.whole import own_part, packed

Values = Mapping[str, Callable[[], torch.Tensor]]
"""Functions that return whole tensors on the processor, by every name of a parameter or buffer."""


def deferred_values(model: nn.Module, saved: Collection[str] = ()) -> Values:
    """Returns what makes the parameters of a model that was built in `deferred_weights`.

    Args:
        model: The model.
        saved: Names of what is loaded instead.

    Raises:
        InputError: A parameter or buffer is on the meta device and nothing says its values.
    """
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        deferred = getattr(parameter, "deferred", None)
        if parameter.is_meta and deferred is not None:
            found[name] = deferred.make
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if tensor.is_meta and name not in found and name not in saved:
            raise InputError(
                f"distribute: {name} is on the meta device and has no values; build the model in rlplace.deferred_weights()"
            )
    return found


@dataclass(frozen=True)
class Stored:
    """A tensor in a folder of torch's distributed checkpoints, of which a process reads its part."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        read_stored({self: whole})
        return whole


def read_stored(tensors: Mapping[Stored, torch.Tensor]) -> None:
    """Fills tensors of one folder in place, DTensors by this process's parts."""
    if tensors:
        state: dict[str, Any] = {source.name: tensor for source, tensor in tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(state, storage_reader=IndexReader(next(iter(tensors)).folder), no_dist=True)


def saved_values(path: str | Path, model: nn.Module) -> Values:
    """Returns what reads the parameters and saved buffers of a model; what nothing reads stays on disk.

    Args:
        path: A safetensors file, a folder of such files whose tensors have the names of the model, or one that
            `torch.distributed.checkpoint.save` wrote, in which all names may begin with ``model.``, too.
        model: Its parameters must all be there, tied ones under any of their names.

    Raises:
        InputError: There are no such files, or a tensor is missing or has another shape.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    saved = model.state_dict().keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    stored = (Path(path) / ".metadata").is_file()
    found = _in_checkpoint(Path(path), tensors) if stored else _in_safetensors(Path(path))
    missing = [alike[0] for alike in names.values() if not any(name in found for name in alike)]
    if missing:
        few = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        others = ", ".join(sorted(found.keys() - tensors.keys())[:3])
        has = f"; it has {others}" if others else ""
        raise InputError(f"distribute: weights={str(path)!r} has no tensor {few}{has}: it is of another model, or names differ")
    values: dict[str, Callable[[], torch.Tensor]] = {}
    for alike in names.values():
        source = next(name for name in alike if name in found)
        shape, read = found[source]
        if shape != tuple(tensors[source].shape):
            here = tuple(tensors[source].shape)
            raise InputError(f"distribute: {source} has the shape {shape} in weights={str(path)!r}, and {here} here")
        values |= dict.fromkeys(alike, read)
    return values


_Found = dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]


def _in_safetensors(path: Path) -> _Found:
    """Returns shapes, and what reads tensors, by name."""
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise InputError(
            f"distribute: weights={str(path)!r} is no safetensors file, no folder of such files and no checkpoint of torch"
        )
    found: _Found = {}
    for file in files:
        try:
            opened = safe_open(file, "pt")  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise InputError(f"distribute: {file} cannot be read: {error}") from None
        for name in opened.keys():
            found[name] = tuple(opened.get_slice(name).get_shape()), partial(opened.get_tensor, name)
    return found


def _in_checkpoint(folder: Path, wanted: Iterable[str]) -> _Found:
    """Returns shapes and what reads tensors, by name, of a folder that torch's distributed checkpoint wrote.

    The prefix below which most of the wanted names are is left out.
    """
    index = IndexReader(folder).read_metadata().state_dict_metadata
    prefix = max(("", "model."), key=lambda before: sum(f"{before}{name}" in index for name in wanted))
    found: _Found = {}
    for name, item in index.items():
        if isinstance(item, TensorStorageMetadata) and name.startswith(prefix):
            shape = tuple(item.size)
            found[name.removeprefix(prefix)] = shape, Stored(folder, name, shape, item.properties.dtype)
    return found


def move(module: nn.Module, device: torch.device) -> None:
    """Moves what has values to a device; what is made later stays on the meta device."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


@torch.no_grad()
def fill(root: nn.Module, values: Values, device: torch.device, on_host: Sequence[nn.Module] = ()) -> None:
    """Gives a process's parts of parameters and buffers their values, one whole tensor at a time.

    Args:
        root: With the names of the model; its parameters may be on the meta device.
        values: By name; what has no value stays as it is.
        device: Where parameters go that have no values yet.
        on_host: Modules whose parameters stay in host memory.
    """
    if not values:
        return
    host = {id(parameter) for module in on_host for parameter in module.parameters()}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        where = torch.device("cpu") if id(tensor) in host else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor

    for name, parameter in root.named_parameters():
        if parameter.is_meta and name not in values:
            raise InputError(f"distribute: {name} is on the meta device and has no values")
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for own, held in module._parameters.items():
            if held is not None:
                holders.setdefault(id(held), []).append((module, own))
    root._apply(empty)  # which gives every holder of a tied parameter one of its own
    for (first, its), *others in holders.values():
        for module, own in others:
            module._parameters[own] = first._parameters[its]
    direct: dict[Stored, torch.Tensor] = {}
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if name in values:
            source = values[name]
            if isinstance(source, Stored) and source not in direct and not packed(tensor):
                direct[source] = tensor.detach()
                continue
            whole = source().to(tensor.dtype)
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(own_part(whole, tensor).to_local())
            else:
                tensor.copy_(whole)
    read_stored(direct)
