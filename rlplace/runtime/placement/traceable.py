"""Whether the engine of placements can trace a model, asked while it is planned."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.model.capture.export import (
    OwnBackwardError,
    RecomputationError,
    RefuseLosses,
    refuse_functions,
    refuse_recomputation,
)
from rlplace.model.capture.fake import any_dtype_grouped_mm, fake_copy, fake_inputs, meta_copy, new_fake_mode
from rlplace.model.capture.inputs import split_inputs
from rlplace.runtime.base.forward_graph import any_value, forward_graph, refuse_backward_hooks
from rlplace.runtime.placement.graph import joint_graph

MOST_TRACED = 1500
"""Forward ops of a model that is traced while it is planned; a larger one runs on fake tensors, which shows most reasons."""


def why_not_traced(model: nn.Module, inputs: Any, method: str, num_ops: int) -> str | None:
    """Why the engine of placements cannot trace a model; None where nothing is known against it.

    Args:
        model: Real or meta module.
        inputs: Example inputs.
        method: The method that captured it.
        num_ops: Its forward ops.
    """
    if method != "export":
        return "torch.export does not follow its forward"
    args, kwargs = split_inputs(inputs)
    try:
        if num_ops <= MOST_TRACED:
            joint_graph(forward_graph(meta_copy(model), args, kwargs, loss=any_value))
        else:
            _run(model, args, kwargs)
    except (OwnBackwardError, RecomputationError) as error:
        return str(error)
    except InputError as error:
        return str(error).partition("; a placement of ops needs")[0]
    except Exception as error:  # the model's own code, or a trace of it
        return f"tracing it raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return None


def _run(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Runs a forward on fake tensors, and raises where it does what a graph would lose."""
    refuse_backward_hooks(model)
    mode = new_fake_mode()
    fake = fake_copy(model, mode)
    fake_args, fake_kwargs = fake_inputs((args, kwargs), mode)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mode, any_dtype_grouped_mm(), refuse_functions(), refuse_recomputation(), RefuseLosses():
            fake(*fake_args, **fake_kwargs)
