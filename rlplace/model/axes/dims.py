"""Sizes of the dimensions of one ATen op that its time depends on beyond FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

Args = Sequence[Any]


def dims_of(name: str, args: Args) -> dict[str, int] | None:
    """Named sizes of an ATen op; None for ops whose time is a matter of FLOPs and bytes alone.

    Matrix products: m, n, k and, for batched ones, batch. Convolutions of 3 x 3 with stride 1: those of the product that they
    are, and the width of the image, which decides what Winograd's tiles waste. Fused attention: batch, heads, queries, keys,
    width and, where the causal half is skipped, causal = 1. Norms and softmax over their last dimensions: rows, columns.

    Args:
        name: Op name without namespace and overload.
        args: Positional arguments as dispatched.
    """
    if name in _PRODUCTS:
        return _product(args, _PRODUCTS[name])
    if name in _CONVOLUTIONS:
        return _winograd(args)
    if name in _ROWS:
        return _ROWS[name](args)
    if name.startswith("_scaled_dot_product") and "attention" in name:
        return _attention(args, 1 if name.endswith("_backward") else 0)
    return None


def argument_dims(target: Any, args: Args, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """What the arguments of an exported op change in how eager code runs it.

    Attention with dropout: dropout = 1, since capture replaces it by the fused kernel. Grouped convolutions: groups and,
    with one input channel each, depthwise = 1.
    """
    dims: dict[str, int] = {}
    schema = getattr(target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name not in ("dropout_p", "groups"):
            continue
        value = kwargs.get(argument.name, args[position] if position < len(args) else None)
        if argument.name == "dropout_p" and isinstance(value, float) and value > 0:
            dims["dropout"] = 1
        elif argument.name == "groups" and isinstance(value, int) and value > 1:
            dims["groups"] = value
            if len(args) > 1 and args[1].shape[1] == 1:
                dims["depthwise"] = 1
    return dims


_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""Position of the left operand."""


def _product(args: Args, where: int) -> dict[str, int]:
    left, right = args[where].shape, args[where + 1].shape
    dims = {"m": int(left[-2]), "n": int(right[-1]), "k": int(left[-1])}
    if len(left) == 3:
        dims["batch"] = int(left[0])
    return dims


_CONVOLUTIONS = ("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution")


def _winograd(args: Args) -> dict[str, int] | None:
    inputs, weight = args[0].shape, args[1].shape
    ones = all(step == 1 for step in (*args[3], *args[5])) if len(args) > 8 else False
    if tuple(weight[2:]) != (3, 3) or not ones or args[6] or args[8] != 1 or len(inputs) != 4:
        return None
    height, width = (int(size) + 2 * int(pad) - 2 for size, pad in zip(inputs[2:], (*args[4], *args[4]), strict=False))
    return {"m": int(inputs[0]) * height * width, "n": int(weight[0]), "k": 9 * int(weight[1]), "image": width}


def _attention(args: Args, first: int) -> dict[str, int] | None:
    query, key = args[first].shape, args[first + 1].shape
    if len(query) != 4:
        return None
    dims = {name: int(size) for name, size in zip(("batch", "heads", "queries", "width"), query, strict=True)}
    dims["keys"] = int(key[-2])
    # The position of is_causal differs by kernel; it is the only argument that can be the value True.
    if any(argument is True for argument in args[first + 3 :]):
        dims["causal"] = 1
    return dims


def _rows(tensor: Any, columns: int) -> dict[str, int] | None:
    count = int(tensor.numel())
    return {"rows": count // columns, "columns": columns} if columns > 0 and count else None


def _layer_norm(inputs: int, shape: int) -> Callable[[Args], dict[str, int] | None]:
    def rule(args: Args) -> dict[str, int] | None:
        return _rows(args[inputs], prod(args[shape]))

    return rule


def _softmax(args: Args) -> dict[str, int] | None:
    tensor, dim = args[0], int(args[1])
    if not tensor.dim() or dim % tensor.dim() != tensor.dim() - 1:
        return None
    return _rows(tensor, int(tensor.shape[-1]))


def _softmax_backward(args: Args) -> dict[str, int] | None:
    return _softmax((args[0], args[2]))


_ROWS: dict[str, Callable[[Args], dict[str, int] | None]] = {
    "native_layer_norm": _layer_norm(0, 1),
    "native_layer_norm_backward": _layer_norm(1, 2),
    "_fused_rms_norm": _layer_norm(0, 1),
    "_fused_rms_norm_backward": _layer_norm(1, 2),
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
}
