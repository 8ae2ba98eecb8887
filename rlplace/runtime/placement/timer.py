"""Step times of placements on the devices of one process, for `rlplace.envs.MeasuredBackend`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base.steps import time_step
from rlplace.runtime.placement.apply import apply


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
