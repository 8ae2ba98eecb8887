"""One training step: loss, backward, update; its time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.model.capture.inputs import no_loss, split_inputs
from rlplace.runtime.base import activity
from rlplace.runtime.base.environment import read_clock

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""torch's optimizers, by the names of `rlplace.capture`; called with parameters or groups of them, and ``lr``."""


def time_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None,
    devices: Sequence[torch.device | str],
) -> float:
    """Runs one training step.

    Args:
        module: The model, on its devices.
        optimizer: Updates its parameters.
        inputs: A tuple of arguments or a dict of keyword arguments.
        loss: As in `step_timer`.
        devices: What to wait for before and after.

    Returns:
        Seconds of forward, loss, backward and update.
    """
    places = {torch.device(device) for device in devices}
    begin = max(map(read_clock, places))
    train_step(module, optimizer, inputs, loss=loss)
    return max(map(read_clock, places)) - begin


def train_step(
    module: Any,
    optimizer: torch.optim.Optimizer,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    clip: float | None = None,
    autocast: Autocast = contextlib.nullcontext,
) -> Tensor:
    """Returns one training step; leaves the gradients in place and returns the loss, detached.

    Args:
        module: The model, or this process's part of a distributed one.
        optimizer: Updates its parameters.
        inputs: A tuple of arguments or a dict of keyword arguments, the same on every process.
        loss: As in `step_timer`.
        clip: Norm that the gradients of a distributed model are clipped to.
        autocast: Makes what the forward runs under.
    """
    args, kwargs = split_inputs(inputs)
    module.zero_grad(set_to_none=True)
    with autocast():
        output = module(*args, **kwargs)
    value = loss_of(output, loss)
    value.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        module.clip_grad_norm_(clip)
    activity.mark("update")
    optimizer.step()
    activity.mark(None)
    return value.detach()


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Returns the scalar to differentiate: `loss` of the output, else the output's ``loss`` (attribute or key), else the
    output.
    """
    if loss is not None:
        return loss(output)
    if isinstance(output, Mapping):
        value: Any = output.get("loss")
    else:
        value = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(value, Tensor):
        raise InputError(no_loss(output))
    return value
