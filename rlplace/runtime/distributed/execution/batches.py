"""Checks that all processes of a replica are called with the same batch.

Every process of a replica works on the same samples. A sampler or a loader that deals them out to processes, as for data
parallel training, would give each process another batch, and the model would train on mixtures of them without a sign.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime.distributed.graph.same_graph import bytes_of
from rlplace.runtime.distributed.ranks import Ranks, gather_objects


def samples_of(arguments: Any) -> int:
    """Samples of a batch: rows of its first tensor.

    Raises:
        InputError: There is no tensor, or it has no first dimension.
    """
    first = next((leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    if first is None or first.dim() == 0 or len(first) == 0:
        raise InputError(
            "distribute: the first tensor input must have the batch as its first dimension, and it must not be empty"
        )
    return len(first)


def check_inputs(arguments: Any) -> None:
    """Refuses inputs that require a gradient: a training step runs as a whole, before anybody asks for gradients.

    Raises:
        InputError: One does.
    """
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(arguments)):
        raise InputError(
            "distribute: an input requires a gradient, and none flows out of a distributed model; detach it, or make what "
            "computes it a part of the model"
        )


CALLS = 2
"""Calls that are checked; a batch costs about as much as a look at every element and a message of a few bytes."""


def check_first_batches(model: nn.Module, ranks: Ranks, share: str) -> None:
    """Makes the first calls of a distributed model compare their inputs over the processes that must get the same.

    Args:
        model: The distributed model.
        ranks: Its processes.
        share: See `rlplace.distribute`.
    """
    alike = ranks.replicas if share == "replica" else [{rank for row in ranks.replicas for rank in row}]
    if max(map(len, alike)) < 2:
        return
    left = [CALLS]

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        digests = gather_objects(digest((args, kwargs)))
        left[0] -= 1
        if left[0] == 0:
            handle.remove()
        if any(len({digests[rank] for rank in row}) > 1 for row in alike):
            raise InputError(
                "distribute: the processes were called with different batches; every process of a replica works on the whole "
                "batch, so seed all alike and leave out DistributedSampler and loaders that split batches over processes"
            )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True, prepend=True)


def digest(inputs: Any) -> bytes:
    """A few bytes that tell batches apart."""
    seen = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            seen.update(bytes_of(leaf))
    return seen.digest()
