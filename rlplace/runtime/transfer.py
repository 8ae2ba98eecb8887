"""Moving parameters, buffers and activations between devices, each once and with ties kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from rlplace.errors import InputError


def move_tensors(model: nn.Module, device_of: Mapping[str, torch.device]) -> None:
    """Moves parameters and buffers in place.

    A `Parameter` stays the same object, so ties and existing references (an optimizer, ``nn.LSTM``'s weight list) survive.

    Args:
        model: The module to change.
        device_of: Device by qualified name, for the first name of every parameter and buffer.
    """
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in recurrent:
        layer._flat_weight_refs = []  # weak references, which forbid tensors to trade places
    for name, parameter in model.named_parameters():
        _move_parameter(parameter, device_of[name])
    moved: dict[int, torch.Tensor] = {}
    for name, buffer in model.named_buffers():
        moved[id(buffer)] = buffer.to(device_of[name])
    for module in model.modules():
        for key, value in module._buffers.items():
            if value is not None:
                module._buffers[key] = moved[id(value)]
    for layer in recurrent:
        layer._init_flat_weights()


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    if parameter.device == device:
        return
    gradient = parameter.grad
    parameter.grad = None
    moved = parameter.detach().to(device)
    # The two ways of nn.Module.to: tensor subclasses cannot take another's storage, they trade places with it.
    if is_traceable_wrapper_subclass(moved) or is_traceable_wrapper_subclass(parameter):
        torch.utils.swap_tensors(parameter, nn.Parameter(moved, requires_grad=parameter.requires_grad))
    else:
        parameter.data = moved
    if gradient is not None:
        parameter.grad = gradient.to(device)


def device_bytes(model: nn.Module, devices: tuple[torch.device, ...]) -> tuple[int, ...]:
    """Bytes of parameters and buffers on each device; tied ones count once."""
    total = dict.fromkeys(devices, 0)
    for tensor in [*model.parameters(), *model.buffers()]:
        total[tensor.device] = total.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    return tuple(total[device] for device in devices)


def refuse_deepcopy(module: nn.Module) -> None:
    """Makes ``copy.deepcopy(module)`` an error: the copy would share the original's forward, and run its weights."""

    def refuse(memo: Any) -> Any:
        raise InputError(f"deepcopy: this {type(module).__name__} runs a plan and cannot be copied; copy it before apply")

    vars(module)["__deepcopy__"] = refuse


class CopyCache:
    """Copies of tensors on other devices, at most one per tensor, device and version, during one forward pass.

    Attributes:
        copies: Copies made so far.
    """

    def __init__(self) -> None:
        self.copies = 0
        self._known: Any = WeakTensorKeyDictionary()

    def get(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`tensor` on `device`; the same copy again unless either has been written to since."""
        if tensor.device == device:
            return tensor
        if tensor.is_inference():  # these have no version counter
            return self._copy(tensor, device)
        known = self._known.setdefault(tensor, {})
        # A copy made without gradients must not serve a call that needs them.
        key = (device, torch.is_grad_enabled())
        version, copy, copy_version = known.get(key, (-1, None, -1))
        if copy is None or version != tensor._version or copy_version != copy._version:
            copy = self._copy(tensor, device)
            known[key] = (tensor._version, copy, copy._version)
        return copy  # type: ignore[no-any-return]

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.copies += 1
        return tensor.to(device)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies `function` to every tensor in nested inputs; anything else is passed on as it is.

    Containers are rebuilt only when a tensor in them changed, so that objects which a model compares by identity or fills as
    it goes (caches) stay the caller's own.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        items = [map_tensors(item, function) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [map_tensors(item, function) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(*items)
    if type(value) is dict:
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        return value if all(mapped[key] is value[key] for key in value) else mapped
    return value
