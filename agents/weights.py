"""Weights as safetensors, checked before they go into a module. Reading them runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from rlplace.errors import InputError, show
from rlplace.files import read_bytes


def fill(module: torch.nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Loads weights from the file `path` into a module after checking every name, shape and value."""
    check(module.state_dict(), weights, path)
    module.load_state_dict(weights)


def check(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuses weights from the file `path` whose names, shapes, types or values are not those of a module's state."""
    for key in [*expected, *weights]:
        if key not in weights or key not in expected:
            raise InputError(f"{path}: weight {key[:80]!r} is {'missing' if key not in weights else 'not expected'}")
        if weights[key].shape != expected[key].shape:
            shapes = tuple(weights[key].shape), tuple(expected[key].shape)
            raise InputError(f"{path}: weight {key!r} has shape {shapes[0]}, the config asks for {shapes[1]}")
        if weights[key].dtype != expected[key].dtype:
            raise InputError(f"{path}: weight {key!r} is of {weights[key].dtype}, not of {expected[key].dtype}")
        if not torch.isfinite(weights[key]).all():
            raise InputError(f"{path}: weight {key!r} holds values that are not finite")
        if key == "scale" and not (weights[key] > 0).all():
            raise InputError(f"{path}: weight 'scale' holds values that are not positive")


def read_tensors(path: Path, payload: bytes | None = None) -> dict[str, Tensor]:
    """Reads a safetensors file, or its contents where they are read already."""
    payload = read_bytes(path) if payload is None else payload
    try:
        return load_tensors(payload)
    except Exception as error:  # safetensors raises its own type for every kind of damage
        raise InputError(f"{path}: not a safetensors file: {show(str(error), 200)}") from None
