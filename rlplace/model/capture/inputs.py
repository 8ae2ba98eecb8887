"""The inputs with which a model was captured: structure, shapes and dtypes as JSON.

It stays in the ``source`` of a graph, of its problems and of their plans, so that a plan can be executed without example inputs
at hand. Every part is an object with one key for its type: ``tensor`` (its shape, with ``dtype`` beside it), ``tuple``,
``list``, ``dict`` or ``value`` (a plain argument).

Optimizers of `torch.optim`: their FLOPs, traffic and state, and the temporary memory of an update.

State has the dtype of the parameter, as in torch (`zeros_like(parameter)`), unless there are master weights: a float32 copy of
the parameter, and state in float32 (what Megatron and DeepSpeed call mixed-precision Adam, 16 bytes per parameter in all).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from rlplace.errors import InputError, show
from rlplace.model.capture.record import Recorder

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
    """Returns arguments of a call without their values; None when they hold something that JSON cannot express.

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
    """Returns the arguments that `describe_inputs` described, tensors on the meta device.

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


LOSS_LABEL = "loss_fn"
"""Forward op that stands for a loss function given by the caller."""

_WHERE = "which a function that a MODEL names returns as its third part"


def loss_of_output(output: Any, loss: Callable[[Any], torch.Tensor] | None, recorder: Recorder) -> torch.Tensor:
    """Returns the scalar to differentiate.

    Args:
        output: Of the model.
        loss: Function of it; None: it has a loss, or is one.
        recorder: Gives the function an op of its own.

    Raises:
        InputError: There is none, or it depends on no parameter.
    """
    if loss is not None:
        with recorder.label(LOSS_LABEL, "loss", "") as label:
            label.parts = []
            value: Any = loss(output)
        origin = "loss(output)"
    elif isinstance(output, torch.Tensor):
        value, origin = output, "the model's output"
    else:
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        origin = "output.loss"
        if value is None:
            raise InputError(no_loss(output))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"no loss: {origin} is {what}, expected a scalar tensor; give loss=a function of the output, {_WHERE}")
    if not value.requires_grad:
        raise InputError(f"no gradient: {origin} does not depend on any trainable parameter; unfreeze one")
    return value


def no_loss(output: Any) -> str:
    """Explains why an output has no loss, and what to give.

    Args:
        output: What a model returned that is no tensor.
    """
    held = dict(output) if isinstance(output, Mapping) else {}
    kind = f"a {type(output).__name__}" + (f" of {', '.join(map(str, held))}"[:200] if held else "")
    scalars = [isinstance(value, torch.Tensor) and value.numel() == 1 for value in held.values()]
    if scalars and all(scalars):
        return f"no loss: the model returns {kind}; give loss=lambda output: sum(output.values()), {_WHERE}"
    return f"no loss: the model returns {kind} without one; give labels, or loss=a function of the output, {_WHERE}"


KERNELS = ("foreach", "fused", "single")
"""Implementations of an update in torch: `foreach` (all parameters at once, torch's choice on GPUs), `fused` (one kernel, no
temporaries) and `single` (parameter by parameter)."""


@dataclass(frozen=True)
class Optimizer:
    """One optimizer.

    Attributes:
        flops: FLOPs per element.
        weight_traffic: Bytes read and written, in sizes of the parameter: the parameter twice, the gradient once.
        moments: Copies of the parameter that it keeps.
        foreach_temporaries: Copies of all parameters that a foreach update holds at once, in the state's dtype.
        single_temporaries: Copies of one parameter that a single update holds at once.
    """

    flops: float
    weight_traffic: float
    moments: int
    foreach_temporaries: int
    single_temporaries: int

    def state_bytes(self, elements: int, element_bytes: int, master_weights: bool) -> int:
        """Returns state of a parameter; a float32 parameter is its own master."""
        if master_weights and element_bytes < 4:
            return 4 * elements * (1 + self.moments)
        return element_bytes * elements * self.moments

    def temporaries(self, kernel: str) -> int:
        """Copies that an update holds, of all parameters for foreach, of one for the others."""
        return {"foreach": self.foreach_temporaries, "single": self.single_temporaries, "fused": 0}[kernel]


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        # torch/optim/adam.py: foreach takes the square roots of all second moments; single holds a root, its quotient and the
        # quotient of the parameter before, which the loop's variable still names.
        "sgd": Optimizer(2.0, 3.0, 0, 0, 0),
        "momentum": Optimizer(4.0, 3.0, 1, 0, 0),
        "adam": Optimizer(12.0, 3.0, 2, 1, 3),
        "adamw": Optimizer(13.0, 3.0, 2, 1, 3),
    }
)
