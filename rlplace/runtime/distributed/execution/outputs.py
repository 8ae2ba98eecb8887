"""What the model returns when it is evaluated, put together from micro-batches of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from rlplace.runtime.distributed.ranks import gather_objects
from rlplace.runtime.distributed.state.whole import gather_tensors, tensors_of


def join_leaves(parts: Sequence[Sequence[Any]], samples: Sequence[int], mean: bool) -> list[Any]:
    """Micro-batches put together again.

    Floating-point scalars, such as losses, count by their share of the samples (or are added up), tensors whose first dimension
    grows with the batch are concatenated along it; of everything else the last micro-batch's is taken.

    Args:
        parts: The flat outputs of each micro-batch.
        samples: Number of samples of each micro-batch.
        mean: Whether scalars are means over the samples.
    """
    total = sum(samples)
    joined = []
    for position in range(len(parts[0])):
        values = [part[position] for part in parts]
        first = values[0]
        tensor = isinstance(first, torch.Tensor)
        if tensor and first.is_floating_point() and first.dim() == 0:
            joined.append(sum(v * (n / total if mean else 1.0) for v, n in zip(values, samples, strict=True)))
        elif tensor and first.dim() > 0 and _grows(values, samples):
            joined.append(torch.cat(values) if len(values) > 1 else first)
        else:
            joined.append(values[-1])
    return joined


def gather_outputs(own: Sequence[Any] | None, replica: int, device: torch.device) -> list[list[Any]]:
    """What the model returned for the micro-batches of each replica, on every rank; all ranks call it.

    Args:
        own: On one rank of each replica its outputs, else None.
        replica: The replica that this rank is part of.
        device: Where tensors go.
    """
    told = gather_objects(None if own is None else (replica, pytree.tree_map_only(torch.Tensor, lambda tensor: 0, list(own))))
    leaves = {(dist.get_rank(), at): leaf for at, leaf in enumerate(pytree.tree_leaves(list(own or ())))}
    tensors = gather_tensors(tensors_of(leaves), device, everywhere=True)
    gathered: dict[int, list[Any]] = {}
    for source, said in enumerate(told):
        if said is not None:
            flat, spec = pytree.tree_flatten(said[1])
            found = [tensors.get((source, at), leaf) for at, leaf in enumerate(flat)]
            gathered[said[0]] = pytree.tree_unflatten(found, spec)
    return [gathered[number] for number in sorted(gathered)]


def _grows(values: Sequence[torch.Tensor], samples: Sequence[int]) -> bool:
    """Whether the first dimension grows with the number of samples.

    It does when it is that number, or always so many times it, unless every micro-batch has the same values: a mask of ten
    by ten tokens is as long as ten tokens of one sample, but does not depend on the sample.
    """
    if any(len(v) * samples[0] != len(values[0]) * n or len(v) % n for v, n in zip(values, samples, strict=True)):
        return False
    return len(values[0]) == samples[0] or not all(torch.equal(v, values[0]) for v in values[1:])
