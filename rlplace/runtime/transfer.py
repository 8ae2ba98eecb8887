"""Moving parameters and buffers between devices, with ties kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError


def move_tensors(model: nn.Module, device_of: Mapping[str, torch.device]) -> None:
    """Moves parameters and buffers in place.

    A `Parameter` stays the same object, so ties and existing references (an optimizer, ``nn.LSTM``'s weight list) survive.

    Args:
        model: The module to change.
        device_of: Device by qualified name, for the first name of every parameter and buffer.
    """
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    gradients = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
    there = {id(tensor): device_of[name] for name, tensor in (*parameters, *buffers, *gradients)}
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        device = there.get(id(tensor))
        if device is None:  # a gradient that was moved with another name of its parameter
            return tensor
        return tensor.to(device) if isinstance(tensor, nn.Parameter) else moved.setdefault(id(tensor), tensor.to(device))

    for module in model.modules():
        module._apply(move, recurse=False)


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
