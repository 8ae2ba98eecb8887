"""The inputs with which a model was captured: structure, shapes and dtypes as JSON.

It stays in the ``source`` of a graph, of its problems and of their plans, so that a plan can be executed without example inputs
at hand. Every part is an object with one key for its type: ``tensor`` (its shape, with ``dtype`` beside it), ``tuple``,
``list``, ``dict`` or ``value`` (a plain argument).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, show

if TYPE_CHECKING:
    import torch

MAX_PARTS = 1000
"""Inputs of more parts are not described."""

_PLAIN = (bool, int, float, str, type(None))


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call from example inputs: a dict by keyword, a tuple, or one tensor.

    Raises:
        InputError: The inputs are something else.
    """
    import torch

    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):  # a tokenizer's BatchEncoding, too
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise InputError(f"example_inputs: expected a dict, a tuple or a tensor, found {type(inputs).__name__}")


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of a call without their values; None when they hold something that JSON cannot express.

    Args:
        args: Positional arguments: tensors and plain values, nested in tuples, lists and dicts.
        kwargs: Keyword arguments.
    """
    parts = [0]
    try:
        return {
            "args": [_describe(item, parts) for item in args],
            "kwargs": {k: _describe(v, parts) for k, v in kwargs.items()},
        }
    except _Indescribable:
        return None


def described_inputs(description: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `describe_inputs` described, tensors on the meta device.

    Raises:
        InputError: The description is damaged.
    """
    if not isinstance(description, Mapping) or set(description) != {"args", "kwargs"}:
        raise InputError(f"inputs: expected an object with args and kwargs, found {show(description)}")
    args, kwargs = description["args"], description["kwargs"]
    if not isinstance(args, list) or not isinstance(kwargs, Mapping):
        raise InputError("inputs: expected args as a list and kwargs as an object")
    return tuple(_build(item) for item in args), {str(key): _build(item) for key, item in kwargs.items()}


class _Indescribable(Exception):
    pass


def _describe(item: Any, parts: list[int]) -> dict[str, Any]:
    import torch

    parts[0] += 1
    if parts[0] > MAX_PARTS:
        raise _Indescribable
    if isinstance(item, torch.Tensor):
        return {"tensor": [int(size) for size in item.shape], "dtype": str(item.dtype).removeprefix("torch.")}
    if type(item) in _PLAIN and item not in (float("inf"), float("-inf")) and item == item:
        return {"value": item}
    if type(item) in (tuple, list):
        return {type(item).__name__: [_describe(value, parts) for value in item]}
    if type(item) is dict and all(isinstance(key, str) for key in item):
        return {"dict": {key: _describe(value, parts) for key, value in item.items()}}
    raise _Indescribable


def _build(item: Any) -> Any:
    import torch

    if isinstance(item, Mapping):
        match dict(item):
            case {"tensor": list(shape), "dtype": str(dtype), **rest} if not rest:
                if all(type(size) is int and size >= 0 for size in shape):
                    try:
                        return torch.empty(shape, dtype=_dtype(dtype), device="meta")
                    except (RuntimeError, OverflowError, TypeError):
                        raise InputError(f"inputs: a tensor of shape {show(shape)} is larger than torch can name") from None
            case {"value": value, **rest} if not rest and type(value) in _PLAIN:
                return value
            case {"tuple": list(values), **rest} if not rest:
                return tuple(_build(value) for value in values)
            case {"list": list(values), **rest} if not rest:
                return [_build(value) for value in values]
            case {"dict": dict(values), **rest} if not rest:
                return {str(key): _build(value) for key, value in values.items()}
    raise InputError(f"inputs: expected a tensor, value, tuple, list or dict, found {show(item)}")


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"inputs: {show(name)} is no dtype of torch")
    return dtype
