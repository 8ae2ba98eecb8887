"""Times a plan for real: one process, several devices.

`step_timer` makes the function that `rlplace.envs.MeasuredBackend` asks for.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.graph.inputs import split_inputs
from rlplace.graph.loss import no_loss
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.apply import apply
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.environment import read_clock

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""torch's optimizers, by the names of `rlplace.capture`; called with parameters or groups of them, and ``lr``."""


def step_timer(
    build: Callable[[], nn.Module],
    devices: Sequence[torch.device | str],
    example_inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
    warmup: int = 2,
    repeats: int = 5,
) -> Callable[[PlacementPlan], float]:
    """Makes a function that measures the step time of a plan.

    Args:
        build: Makes the unplaced model; called once a plan, so that plans do not share state.
        devices: One per device of the plan.
        example_inputs: Inputs of a step, a tuple of arguments or a dict of keyword arguments.
        loss: Maps the output to the scalar loss; default ``output.loss``, or the output itself when it is a tensor.
        optimizer: Called with the parameters.
        warmup: Steps before timing; the first ones allocate optimizer state.
        repeats: Timed steps.

    Returns:
        Function from a plan to the median seconds of one step: forward, loss, backward, update. It lets
        ``torch.OutOfMemoryError`` through.
    """
    if warmup < 1 or repeats < 1:
        raise InputError("step_timer needs at least one warm-up step and one repeat")

    def measure(plan: PlacementPlan) -> float:
        placed = apply(build(), plan, devices, example_inputs=example_inputs)
        trainable = optimizer([p for p in placed.parameters() if p.requires_grad])
        steps = range(warmup + repeats)
        seconds = [time_step(placed, trainable, example_inputs, loss=loss, devices=devices) for _ in steps]
        return statistics.median(seconds[warmup:])

    return measure


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
    """One training step; leaves the gradients in place and returns the loss, detached.

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
    """The scalar to differentiate: `loss` of the output, else the output's ``loss`` (attribute or key), else the output."""
    if loss is not None:
        return loss(output)
    if isinstance(output, Mapping):
        value: Any = output.get("loss")
    else:
        value = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(value, Tensor):
        raise InputError(no_loss(output))
    return value
