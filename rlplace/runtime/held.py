"""What models hold: tensors by name, ties, copies without values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def tensors_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their first names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def first_names(model: nn.Module) -> dict[str, str]:
    """First name of every parameter and buffer by any of its names, so that tied tensors have one."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names[name] = first.setdefault(id(tensor), name)
    return names


def meta_copy(model: nn.Module) -> nn.Module:
    """The module without its values: what is traced when inputs of another shape come."""
    memo: dict[int, Any] = {}
    for tensor in tensors_in(model).values():
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)
