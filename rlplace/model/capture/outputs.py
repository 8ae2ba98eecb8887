"""The loss in what a model returns, and outputs of types that torch does not know."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlplace.model.torch_adapter import pytree

WHERE = "which a function that a MODEL names returns as its third part"
"""Of a loss function, for messages."""


def own_loss(output: Any) -> Any:
    """Returns the loss that a model computes itself; None without one.

    It is the output if that is a tensor, else its ``loss`` (attribute or key), else the first element of a tuple or list where
    that is one number.
    """
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        return output[0] if output and _is_number(output[0]) else None
    return getattr(output, "loss", None)


def is_losses(output: Any) -> bool:
    """Returns whether an output is a dictionary of losses, as detection models return: numbers that are to be added up."""
    return isinstance(output, Mapping) and "loss" not in output and bool(output) and all(map(_is_number, output.values()))


def add_losses(output: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the sum of a dictionary of losses."""
    return torch.stack([value.reshape(()) for value in output.values()]).sum()


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def with_loss(output: Any) -> Callable[[torch.Tensor], Any]:
    """Returns a function from a loss to an output of the same kind that holds it, and nothing else that takes memory."""
    if isinstance(output, torch.Tensor):
        return lambda total: total
    if is_losses(output):
        return lambda total: {"loss": total}
    value, (leaves, spec) = own_loss(output), pytree.tree_flatten(output)
    at = [leaf is value for leaf in leaves]
    if any(at):
        return lambda total: pytree.tree_unflatten([total if here else None for here in at], spec)
    return lambda total: _replaced(output, total)


def _replaced(output: Any, total: torch.Tensor) -> Any:
    """Returns a copy of an object of the user's, with another loss and without its other tensors."""
    made = copy.copy(output)
    for name, value in vars(output).items():
        if isinstance(value, torch.Tensor):
            object.__setattr__(made, name, total if name == "loss" else None)
    return made


def register_dataclasses(output: Any) -> None:
    """Tells torch how to take apart the dataclasses of an output, so that parts of a batch can be joined, and exported."""
    for leaf in pytree.tree_leaves(output):
        kind = type(leaf)
        if dataclasses.is_dataclass(kind) and not pytree.tree_flatten(leaf)[1].is_leaf():
            continue
        if dataclasses.is_dataclass(kind):
            with contextlib.suppress(ValueError):  # one with fields that its constructor does not take
                torch.export.register_dataclass(kind)
                register_dataclasses(leaf)


def no_loss(output: Any) -> str:
    """Explains why an output has no loss, and how to give one."""
    held = f" of {', '.join(map(str, output))}"[:200] if isinstance(output, Mapping) and output else ""
    kind = f"a {type(output).__name__}{held}"
    return f"no loss: the model returns {kind} without one; give labels, or loss=a function of the output, {WHERE}"
