"""Moving parameters and buffers between devices, with ties kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
