"""Gradients that are released: each parameter is updated in the backward, as soon as its gradient is there.

That is torch's recipe of an optimizer step in the backward: a hook that runs once a gradient is accumulated; `fully_shard`
calls it once a share is reduced. A parameter that torch's wrappers leave out is updated as ever, by ``optimizer.step()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.runtime.strategy.wrap import sum_parts


class GradientRelease:
    """Updates by an optimizer while a step runs."""

    def __init__(self) -> None:
        self._optimizer: torch.optim.Optimizer | None = None
        self._running = self._due = False

    def use(self, optimizer: torch.optim.Optimizer, late: Collection[nn.Parameter]) -> None:
        """Takes the optimizer; parameters that are `late` wait for its ``step()``."""
        if self._optimizer is not None:
            raise InputError("release_gradients: gradients go to one optimizer, and there is one already; call it once")
        self._optimizer, waiting = optimizer, set(map(id, late))
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in waiting:
                    parameter.register_post_accumulate_grad_hook(partial(self._update, number))
        optimizer.register_step_post_hook(self._stepped)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Runs a step of a model, whose backward updates.

        Raises:
            InputError: There is no optimizer, or the step before was not ended by ``optimizer.step()``.
        """
        if self._optimizer is None:
            raise InputError("the plan releases gradients: call model.release_gradients(optimizer) before the first step")
        if self._due:
            raise InputError(
                "the plan releases gradients, which cannot be added up over several batches: call optimizer.step() after each, "
                "or plan without --release-gradients"
            )
        self._running = True
        try:
            yield
        finally:
            self._running, self._due = False, True

    def _update(self, number: int, parameter: torch.Tensor) -> None:
        """Updates one parameter, as the whole optimizer would, and frees its gradient."""
        if not self._running:
            raise InputError(
                "the plan releases gradients: a loss outside of the model's own reaches a parameter that has been updated; "
                "make it a part of the model, or plan without --release-gradients"
            )
        optimizer = self._optimizer
        assert optimizer is not None
        sum_parts(parameter)
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[number], "params": [parameter]}]
        try:
            type(optimizer).step(optimizer)  # schedulers count calls of the optimizer's own
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def _stepped(self, *_: object) -> None:
        self._due = False
