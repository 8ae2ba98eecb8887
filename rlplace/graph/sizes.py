"""The graph of a step by its samples, and example inputs of another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlplace.errors import InputError
from rlplace.graph.opgraph import OpGraph


def rows_of(inputs: Any) -> int:
    """Samples of example inputs: rows of their first tensor, 1 where it has no dimensions, 0 where there is no tensor.

    Args:
        inputs: Tensors in tuples, lists and dicts.
    """
    from rlplace.graph.access import tensors_in

    first = next(tensors_in(dict(inputs) if isinstance(inputs, Mapping) else inputs), None)
    return 0 if first is None else max(1, int(first.shape[0])) if first.dim() else 1


def resize_batch(inputs: Any, samples: int, wanted: int) -> Any:
    """Example inputs with another batch size: every tensor whose first dimension is `samples` is cut or repeated.

    Args:
        inputs: Tensors in tuples, lists and dicts.
        samples: Batch size of `inputs`.
        wanted: Batch size of the result.
    """
    import torch
    from torch.utils import _pytree as pytree

    def resized(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dim() == 0 or leaf.shape[0] != samples or samples == wanted:
            return leaf
        return leaf.repeat(-(-wanted // samples), *([1] * (leaf.dim() - 1)))[:wanted]

    return pytree.tree_map_only(torch.Tensor, resized, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def at_batch(graph: OpGraph, capture_at: Callable[[int], OpGraph] | None, batch: int | None, microbatch: int | None) -> OpGraph:
    """The graph of a step that a placement runs as one pass; unchanged where no size is asked for.

    Args:
        graph: A capture.
        capture_at: Captures the model with a number of samples; None: it has this size only.
        batch: Samples a step, or None.
        microbatch: Samples a micro-batch, or None; equal to `batch` where both are there.
    """
    samples = samples_of_pass(batch, microbatch)
    if samples in (None, graph.samples):
        return graph
    assert samples is not None
    if capture_at is None:
        raise InputError(
            f"place: the graph has {graph.samples} samples, {samples} are asked for; place the module, or capture it so"
        )
    return capture_at(samples)


def samples_of_pass(batch: int | None, microbatch: int | None) -> int | None:
    """Samples of the one pass of a placement, by either number; None where neither is there.

    Raises:
        InputError: The two differ.
    """
    if None not in (batch, microbatch) and batch != microbatch:
        raise InputError(
            f"batch: a placement runs its {batch} samples in one pass, not in micro-batches of {microbatch}; leave one out, or "
            "plan a whole strategy"
        )
    return microbatch if batch is None else batch
