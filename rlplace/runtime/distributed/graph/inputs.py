"""What `distribute` traces a model with: example inputs as given, or as the plan describes them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.graph.inputs import described_inputs, split_inputs
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.graph.forward_graph import Loss


def micro_batch(plan: PlacementPlan, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one micro-batch: those given, else, on the meta device, what the plan's model was captured with.

    Raises:
        InputError: Neither is there, or they are something else than a tensor, a sequence or a mapping.
    """
    if example_inputs is None:
        description = ((plan.source or {}).get("graph") or {}).get("inputs")
        if description is None:
            raise InputError(
                "distribute: the plan does not say what the inputs of its model look like; give distribute(model, plan, "
                "example_inputs), the inputs of one micro-batch as a dict by keyword or a tuple"
            )
        return described_inputs(description)
    return split_inputs(example_inputs)


def has_target(model: nn.Module) -> bool:
    """Whether ``target=`` of a call is an input of the model itself and not one of the loss."""
    return "target" in inspect.signature(model.forward).parameters


def takes_target(loss: Loss | None) -> bool:
    """Whether a loss function needs a second argument besides the model's output."""
    if loss is None:
        return False
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # a builtin
        return True
    required = [
        p
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) > 1


def any_loss(output: Any) -> torch.Tensor:
    """Stands for a loss whose target is not known yet, where only the shape of the graph matters."""
    floats = [v for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if not floats:
        raise InputError("distribute: the model returns no floating-point tensor that a loss could read")
    return torch.stack([v.float().sum() for v in floats]).sum()
