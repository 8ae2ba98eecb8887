"""Values of parameters for processes that keep parts of them: made later, or read from safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlplace.errors import InputError
from rlplace.runtime.state.whole import own_part

Values = Mapping[str, Callable[[], torch.Tensor]]
"""Functions that return whole tensors on the processor, by every name of a parameter or buffer."""


def deferred_values(model: nn.Module) -> Values:
    """Returns what makes the parameters of a model that was built in `deferred_weights`.

    Raises:
        InputError: A parameter or buffer is on the meta device and nothing says its values.
    """
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        deferred = getattr(parameter, "deferred", None)
        if parameter.is_meta and deferred is not None:
            found[name] = deferred.make
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if tensor.is_meta and name not in found:
            raise InputError(
                f"distribute: {name} is on the meta device and has no values; build the model in rlplace.deferred_weights()"
            )
    return found


def saved_values(path: str | Path, model: nn.Module) -> Values:
    """Returns what reads the parameters and saved buffers of a model from safetensors; pages that nothing reads stay on disk.

    Args:
        path: A file, or a folder of files whose tensors have the names of the model.
        model: Its parameters must all be there, tied ones under any of their names.

    Raises:
        InputError: There are no such files, or a tensor is missing or has another shape.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
    if not files or not all(file.is_file() for file in files):
        raise InputError(f"distribute: weights={str(path)!r} is no safetensors file and no folder of such files")
    found: dict[str, Callable[[], torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            opened = safe_open(file, "pt")  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise InputError(f"distribute: {file} cannot be read: {error}") from None
        for name in opened.keys():
            found[name] = partial(opened.get_tensor, name)
            shapes[name] = tuple(opened.get_slice(name).get_shape())
    names: dict[int, list[str]] = {}
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    saved = model.state_dict().keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    values: dict[str, Callable[[], torch.Tensor]] = {}
    for alike in names.values():
        source = next((name for name in alike if name in found), None)
        if source is None:
            raise InputError(f"distribute: weights={str(path)!r} has no tensor {alike[0]}; it is of another model")
        shape = tuple(tensors[source].shape)
        if shapes[source] != shape:
            raise InputError(f"distribute: {source} has the shape {shapes[source]} in weights={str(path)!r}, and {shape} here")
        values |= dict.fromkeys(alike, found[source])
    return values


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
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if name in values:
            whole = values[name]().to(tensor.dtype)
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(own_part(whole, tensor).to_local())
            else:
                tensor.copy_(whole)
