"""A replica's share of a batch, in micro-batches, and what each counts in the loss of the step."""

from __future__ import annotations

from collections.abc import Mapping
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
        microbatch: Samples of one pass.
        microbatches: Passes.
        weight: What the mean loss of one pass is multiplied with, so that the mean over the data degree of the replicas'
            sums is the mean over the samples of the batch.
    """

    first: int
    microbatch: int
    microbatches: int
    weight: float

    @property
    def samples(self) -> int:
        """Samples of the replica in a step."""
        return self.microbatch * self.microbatches


def share_of(strategy: Strategy, replica: int) -> Share:
    """The share of a replica: its number on replicate x shard."""
    pipeline = strategy.pipelines[0]
    degree = pipeline.data_degree
    sizes = pipeline.microbatch * (degree // len(pipeline.microbatch))
    counts = pipeline.microbatches * (degree // len(pipeline.microbatches))
    first = sum(size * count for size, count in zip(sizes[:replica], counts[:replica], strict=True))
    return Share(first, sizes[replica], counts[replica], sizes[replica] * degree / strategy.batch)


def own_samples(batch: Batch, share: Share, whole: int) -> dict[str, Any]:
    """A replica's samples of a whole batch: every tensor with as many rows as the batch is cut, others are kept.

    Raises:
        InputError: No tensor has that many rows.
    """
    return _rows(batch, whole, share.first, share.samples)


def micro_batches(batch: Batch, share: Share) -> list[dict[str, Any]]:
    """A replica's samples in micro-batches.

    Raises:
        InputError: The batch has another number of samples, such as the last one of an epoch.
    """
    starts = range(0, share.samples, share.microbatch)
    return [_rows(batch, share.samples, start, share.microbatch) for start in starts]


@dataclass(frozen=True, eq=False)
class Signature:
    """What a model is called with.

    Attributes:
        names: Keyword inputs of the model; a batch may hold more, for the loss.
        kinds: By leaf of them, its shape and dtype, or the value of what is no tensor.
    """

    names: tuple[str, ...]
    kinds: tuple[Any, ...]

    @staticmethod
    def of(inputs: Batch) -> Signature:
        """The signature of example inputs."""
        return Signature(tuple(inputs), tuple(_kind(leaf) for leaf in pytree.tree_leaves(dict(inputs))))

    def inputs(self, part: Batch) -> dict[str, Any]:
        """The model's inputs of a micro-batch.

        Raises:
            InputError: One is missing.
        """
        missing = [name for name in self.names if name not in part]
        if missing:
            raise InputError(f"native: the batch has no {', '.join(missing)}, which example_inputs had; add it")
        return {name: part[name] for name in self.names}

    def leaves(self, part: Batch) -> list[Any]:
        """Flat inputs of a micro-batch, for a graph that was recorded with this signature.

        Raises:
            InputError: An input is missing, or has another shape, dtype or value than what was recorded.
        """
        leaves = pytree.tree_leaves(self.inputs(part))
        kinds = tuple(_kind(leaf) for leaf in leaves)
        if kinds != self.kinds:
            raise InputError(
                f"native: a micro-batch of {kinds} where {self.kinds} was recorded; a pipeline runs one signature: pad to one "
                "shape"
            )
        return leaves


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _rows(batch: Batch, whole: int, start: int, count: int) -> dict[str, Any]:
    leaves, spec = pytree.tree_flatten(dict(batch))
    cut = [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == whole for leaf in leaves]
    if not any(cut):
        found = sorted({len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0})
        raise InputError(
            f"native: the strategy runs {whole} samples here, but no tensor of the batch has that many rows (found "
            f"{', '.join(map(str, found)) or 'no tensors'}); drop a short last batch (drop_last=True), or pad it"
        )
    taken = [leaf[start : start + count] if is_cut else leaf for leaf, is_cut in zip(leaves, cut, strict=True)]
    result: dict[str, Any] = pytree.tree_unflatten(taken, spec)
    return result
