"""A replica's share of a batch, in micro-batches, and what each counts in the loss of the step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Share:
    """What one replica computes of a step.

    Attributes:
        first: Number of its first sample in the batch.
        sizes: Samples of each pass.
        weights: What the mean loss of each pass is multiplied with, so that the mean over the data degree of the replicas'
            sums is the mean over the samples of the batch.
        whole: Samples of the batch.
    """

    first: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    whole: int

    @property
    def samples(self) -> int:
        """Samples of the replica in a step."""
        return sum(self.sizes)


@dataclass(frozen=True, eq=False)
class Pass:
    """One micro-batch.

    Attributes:
        inputs: Keyword inputs of the model.
        part: Everything of the batch that belongs to it, for the loss.
        weight: What its loss counts.
    """

    inputs: dict[str, Any]
    part: dict[str, Any]
    weight: float


def share_of(strategy: Strategy, replica: int, samples: int | None = None) -> Share:
    """The share of a replica: its number on replicate x shard.

    A batch of another size than the strategy's, such as the last one of an epoch, is dealt out as evenly as it goes, in the
    strategy's number of passes or fewer, the same on all replicas. In a pipeline the passes of a replica are of one size.

    Args:
        strategy: What is run.
        replica: Number of the replica.
        samples: Of the batch; None: as many as the strategy says.

    Raises:
        InputError: There are fewer samples than replicas.
    """
    pipeline = strategy.pipelines[0]
    degree = pipeline.data_degree
    if samples is None or samples == strategy.batch:
        sizes = pipeline.microbatch * (degree // len(pipeline.microbatch))
        counts = pipeline.microbatches * (degree // len(pipeline.microbatches))
        passes = [(size,) * count for size, count in zip(sizes, counts, strict=True)]
    else:
        if samples < degree:
            raise InputError(f"native: a batch of {samples} samples for {degree} replicas; drop it (drop_last=True), or pad it")
        most = min(max(pipeline.microbatches), samples // degree)
        own = even_sizes(samples, degree)
        if len(pipeline.stages) > 1:
            passes = [even_sizes(n, next(m for m in range(most, 0, -1) if n % m == 0)) for n in own]
        else:
            passes = [even_sizes(n, most) for n in own]
    total = sum(map(sum, passes))
    first = sum(map(sum, passes[:replica]))
    return Share(first, passes[replica], tuple(size * degree / total for size in passes[replica]), total)


def even_sizes(samples: int, parts: int) -> tuple[int, ...]:
    """Sizes as equal as possible, larger ones first."""
    return tuple(samples // parts + (number < samples % parts) for number in range(parts))


def passes_of(batch: Batch, share: Share, names: Collection[str], kept: Collection[str], device: torch.device) -> list[Pass]:
    """A replica's micro-batches of a batch: every tensor with as many rows as the batch is cut, others are kept.

    Args:
        batch: What the model is called with, and what the loss needs besides.
        share: Of the replica.
        names: Keyword inputs of the model.
        kept: Names of what is not cut although it has as many rows.
        device: Where the micro-batches go.

    Raises:
        InputError: An input is missing, or no tensor has that many rows.
    """
    if missing := [name for name in names if name not in batch]:
        raise InputError(f"native: the batch has no {', '.join(missing)}, which example_inputs had; add it")
    flat, spec = pytree.tree_flatten({name: value for name, value in batch.items() if name not in kept})
    rows = [len(leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() else 0 for leaf in flat]
    if share.whole not in rows:
        found = ", ".join(map(str, sorted({*rows} - {0})))
        raise InputError(
            f"native: the strategy runs {share.whole} samples here, but no tensor of the batch has that many rows (found "
            f"{found or 'no tensors'}); drop a short last batch (drop_last=True), or pad it"
        )
    own, cut = slice(share.first, share.first + share.samples), [count == share.whole for count in rows]
    leaves = [leaf[own] if is_cut else leaf for leaf, is_cut in zip(flat, cut, strict=True)]
    whole = {name: batch[name] for name in batch if name in kept}
    leaves, whole = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), (leaves, whole))
    passes, start = [], 0
    for size, weight in zip(share.sizes, share.weights, strict=True):
        taken = [leaf[start : start + size] if is_cut else leaf for leaf, is_cut in zip(leaves, cut, strict=True)]
        part: dict[str, Any] = pytree.tree_unflatten(taken, spec) | whole
        passes.append(Pass({name: part[name] for name in names}, part, weight))
        start += size
    return passes


def signature_of(inputs: Batch) -> tuple[Any, ...]:
    """What a forward is recorded for: names, and by leaf shape and dtype, or the value of what is no tensor."""
    return tuple(inputs), tuple(_kind(leaf) for leaf in pytree.tree_leaves(dict(inputs)))


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
