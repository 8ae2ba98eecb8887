"""Training a model with a plan against training it as it is, on every rank of a job."""

from __future__ import annotations

import copy

import small_models
import torch
import torch.distributed as dist
from plans import plan_of

from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.execution.batches import split_batch


def build(name, double=True):
    """A small model, its inputs, and its loss function (None where the output has the loss)."""
    torch.manual_seed(0)
    model, inputs, loss = small_models.MODELS[name]()
    if double and name != "mixtral":  # grouped products of experts know no double precision
        model = model.double()
        inputs = torch.utils._pytree.tree_map(
            lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, inputs
        )
    return model, inputs, None if loss is small_models._own_loss else loss


def reference_step(model, inputs, loss, parts):
    """Forward and backward of one batch in `parts` micro-batches; the loss of the batch."""
    total = 0.0
    for part in split_batch((((), inputs),), 1, parts).parts:
        args, kwargs = torch.utils._pytree.tree_unflatten(list(part.leaves), torch.utils._pytree.tree_structure(((), inputs)))
        output = model(*args, **kwargs)
        value = (output.loss if loss is None else loss(output)) * part.weight
        value.backward()
        total += value.item()
    return total


def largest_difference(found, expected):
    """Of two tensors or None, in units of the larger of 1 and the largest value expected."""
    if found is None or expected is None:
        other = found if expected is None else expected
        return 0.0 if other is None else float(other.abs().max())
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0)) if expected.numel() else 0.0


def train_both(name, steps=5, *, engine=None, deal="random", groups=6, seed=0, optimizer=torch.optim.AdamW, **fields):
    """Trains with a plan and without; the largest difference of losses, gradients and parameters of this rank.

    Args:
        name: Of the model.
        steps: To train.
        engine: Name of the engine.
        deal, groups, seed: See `plan_of`.
        optimizer: Called with the parameters.
        fields: Of the plan.
    """
    model, inputs, loss = build(name)
    replicas = fields.get("replicas") or [list(range(dist.get_world_size()))]
    plan = plan_of(model, inputs, len(replicas[0]), loss=loss, groups=groups, deal=deal, seed=seed, **fields)
    reference = copy.deepcopy(model)
    theirs = optimizer(reference.parameters(), lr=1e-3)
    placed = distribute(model, plan, inputs, loss=loss, engine=engine)
    own = list(placed.parameters())
    ours = optimizer(own, lr=1e-3) if own else None
    parts = plan.microbatches * len(replicas)
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "buffer": 0.0}
    for _ in range(steps):
        expected = reference_step(reference, inputs, loss, parts)
        output = placed(**inputs)
        value = output if isinstance(output, torch.Tensor) else output.loss
        value.backward()
        worst["loss"] = max(worst["loss"], abs(value.item() - expected))
        of_reference = dict(reference.named_parameters())
        for key, parameter in placed.named_parameters():
            worst["gradient"] = max(worst["gradient"], largest_difference(parameter.grad, of_reference[key].grad))
        theirs.step()
        theirs.zero_grad()
        if ours is not None:
            ours.step()
            ours.zero_grad()
    of_reference = dict(reference.named_parameters())
    for key, parameter in placed.named_parameters():
        worst["parameter"] = max(worst["parameter"], largest_difference(parameter, of_reference[key]))
    if len(replicas) == 1:
        of_reference = dict(reference.named_buffers())
        for key, buffer in placed.named_buffers():
            if key in of_reference:
                worst["buffer"] = max(worst["buffer"], largest_difference(buffer.double(), of_reference[key].double()))
    return worst, len(own), sorted({key for key, _ in placed.named_parameters()}), placed.report
