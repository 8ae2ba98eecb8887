"""Batches of synthetic samples, the same on every rank.

They come from a model's example inputs, so that every value is in its range: a sample of a batch is one of theirs with its
elements shuffled. Tensors of the same shape are shuffled alike, which keeps labels beside their tokens, and tensors of at most
two different values, such as masks, are not shuffled at all, because their pattern means something.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def synthetic_batch(example_inputs: Any, samples: int, seed: int, step: int) -> Any:
    """A batch for one step.

    Args:
        example_inputs: Nested tensors of one micro-batch; the batch is the first dimension of the first tensor.
        samples: Size of the batch.
        seed: The run's seed.
        step: Number of the step.

    Returns:
        The same nesting; tensors without a batch dimension as they are.
    """
    leaves, spec = pytree.tree_flatten(example_inputs)
    length = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)
    batched: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != length:
            batched.append(leaf)
            continue
        shape = tuple(leaf.shape[1:])
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_000_003 + _number(shape))
        rows = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch = leaf[torch.randint(len(leaf), (samples,), generator=rows)]
        if shape and leaf.unique().numel() > 2:
            flat = batch.reshape(samples, -1)
            order = torch.rand(flat.shape, generator=generator).argsort(dim=1)
            batch = flat.gather(1, order).reshape(batch.shape)
        batched.append(batch)
    return pytree.tree_unflatten(batched, spec)


def _number(shape: tuple[int, ...]) -> int:
    number = 0
    for size in shape:
        number = (number * 8191 + size) % 1_000_003
    return number
