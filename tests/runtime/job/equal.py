"""Small models and how far what they compute is from what is expected."""

from __future__ import annotations

import torch

from tests.runtime import small_models

SINGLE_PRECISION = {"mixtral"}
"""Its products of groups of experts have no kernel in double precision."""


def build(name, double=True, **options):
    """A small model, its inputs, and its loss function (None where the output has the loss)."""
    torch.manual_seed(0)
    model, inputs, loss = small_models.MODELS[name](**options)
    if double and name not in SINGLE_PRECISION:
        model = model.double()
        inputs = torch.utils._pytree.tree_map(
            lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, inputs
        )
    return model, inputs, None if loss is small_models._own_loss else loss


def loss_of(output, loss):
    """The loss of an output, which has it or makes it."""
    return output.loss if loss is None else loss(output)


def largest_difference(found, expected, least=1.0):
    """Of two tensors or None, in units of the larger of `least` and the largest value expected."""
    if found is None or expected is None:
        other = found if expected is None else expected
        return 0.0 if other is None else float(other.abs().max())
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=least)) if expected.numel() else 0.0
