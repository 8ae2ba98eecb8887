"""The scalar of a model's output that a step differentiates, and what to give where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlplace.errors import InputError
from rlplace.model.capture.record import Recorder

LOSS_LABEL = "loss_fn"
"""Forward op that stands for a loss function given by the caller."""

_WHERE = "which a function that a MODEL names returns as its third part"


def loss_of_output(output: Any, loss: Callable[[Any], torch.Tensor] | None, recorder: Recorder) -> torch.Tensor:
    """The scalar to differentiate.

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
    """Why an output has no loss, and what to give.

    Args:
        output: What a model returned that is no tensor.
    """
    held = dict(output) if isinstance(output, Mapping) else {}
    kind = f"a {type(output).__name__}" + (f" of {', '.join(map(str, held))}"[:200] if held else "")
    scalars = [isinstance(value, torch.Tensor) and value.numel() == 1 for value in held.values()]
    if scalars and all(scalars):
        return f"no loss: the model returns {kind}; give loss=lambda output: sum(output.values()), {_WHERE}"
    return f"no loss: the model returns {kind} without one; give labels, or loss=a function of the output, {_WHERE}"
