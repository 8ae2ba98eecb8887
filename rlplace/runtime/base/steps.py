"""One training step: inputs or a synthetic batch, loss, backward, update."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.model.capture.inputs import are_items, described_inputs, rows_of, split_inputs
from rlplace.model.capture.outputs import add_losses, is_losses, no_loss, own_loss
from rlplace.model.torch_adapter import pytree
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base import activity
from rlplace.runtime.base.batches import map_rows, take

Loss = Callable[..., Tensor]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]

_INTEGERS = (torch.int64, torch.int32)


def train_step(
    module: Any,
    optimizer: torch.optim.Optimizer,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    clip: float | None = None,
    autocast: Autocast = contextlib.nullcontext,
) -> Tensor:
    """Runs one training step; leaves the gradients in place and returns the loss, detached.

    Args:
        module: The model, or this process's part of a distributed one.
        optimizer: Updates its parameters.
        inputs: A tuple of arguments or a dict of keyword arguments, the same on every process.
        loss: Maps the output to the scalar loss; None: see `loss_of`.
        clip: Norm that the gradients of a distributed model are clipped to.
        autocast: Makes the context of the forward.
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
    """Returns the scalar to differentiate: `loss` of the output, else the output's own, else the sum of several losses."""
    if loss is not None:
        return loss(output)
    value = add_losses(output) if is_losses(output) else own_loss(output)
    if not isinstance(value, Tensor):
        raise InputError(no_loss(output))
    return value


def micro_batch(plan: PlacementPlan, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments of one micro-batch: the given ones, else, on the meta device, those of the plan's captured model."""
    if example_inputs is None:
        description = ((plan.source or {}).get("graph") or {}).get("inputs")
        if description is None:
            raise InputError(
                "distribute: the plan does not describe the inputs of its model; give distribute(model, plan, "
                "example_inputs), the inputs of one micro-batch as a dict by keyword or a tuple"
            )
        return described_inputs(description)
    return split_inputs(example_inputs)


def has_target(model: nn.Module) -> bool:
    """Returns whether ``target=`` of a call is an input of the model itself and not one of the loss."""
    return "target" in inspect.signature(model.forward).parameters


def takes_target(loss: Loss | None) -> bool:
    """Returns whether a loss function needs a second argument besides the model's output."""
    if loss is None:
        return False
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None)
    except (TypeError, ValueError):  # the output alone is not enough, or it is a builtin
        return True
    return False


def samples_of(arguments: Any, items: bool | None = None) -> int:
    """Returns the samples of a batch: the rows of its first tensor, or the items of its first list of samples."""
    first = next((leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() == 0 or len(first) == 0:
        raise InputError(
            "distribute: the first tensor input must have the batch as its first dimension, and it must not be empty"
        )
    return rows_of(arguments, items)


def check_inputs(arguments: Any) -> None:
    """Refuses inputs that require a gradient: a training step runs as a whole, before ``loss.backward()`` is called."""
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(arguments)):
        raise InputError(
            "distribute: an input requires a gradient, and none flows out of a distributed model; detach it, or make the "
            "computation of it a part of the model"
        )


def synthetic_batch(example_inputs: Any, samples: int, seed: int, step: int) -> Any:
    """Draws a batch for one step, the same on every rank: whole samples of a model's example inputs.

    Every sample of the example comes as often as any other, or once more, in an order of the step's own. Tensors with one row a
    sample are indexed alike; all others stay as they are. Samples stay in their order where rows may belong to them in another
    way, such as values with offsets or lengths in falling order.

    Args:
        example_inputs: Nested tensors; the batch is the first dimension of the first tensor that has one, or samples are items.
        samples: Size of the batch.
        seed: The run's seed.
        step: Number of the step.

    Returns:
        The same nesting.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(example_inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not leaves:
        return example_inputs
    items = are_items(example_inputs)
    length = rows_of(example_inputs, items) if items else len(leaves[0])
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    rounds = -(-samples // length)
    if not items and _in_order(leaves, length):
        rows = torch.arange(length).repeat(rounds)[:samples]
    else:
        rows = torch.cat([torch.randperm(length, generator=generator) for _ in range(rounds)])[:samples]
    return map_rows(example_inputs, length, lambda leaf: take(leaf, rows))


def _in_order(leaves: Sequence[Tensor], length: int) -> bool:
    """Returns whether the order of samples may mean something.

    It may where a tensor has another number of rows (ids of all bags in one tensor, a graph's edges), where a vector of
    integers falls (lengths, as packed sequences need them), and where one counts rows of another (an offset for every id).
    """
    if any(len(leaf) not in (1, length) for leaf in leaves):
        return True
    vectors = [leaf for leaf in leaves if leaf.dim() == 1 and len(leaf) == length > 1 and leaf.dtype in _INTEGERS]
    falling = any(bool((leaf.diff() <= 0).all()) and bool(leaf[0] > leaf[-1]) for leaf in vectors)
    return falling or (
        len(vectors) > 1 and any(torch.equal(leaf.cpu(), torch.arange(length).to(leaf.dtype)) for leaf in vectors)
    )
