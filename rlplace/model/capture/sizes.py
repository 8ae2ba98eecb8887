"""The graph of a step by its samples, and example inputs of another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlplace.errors import InputError
from rlplace.model.graph.opgraph import OpGraph


def rows_of(inputs: Any) -> int:
    """Samples of example inputs: rows of their first tensor, 1 where it has no dimensions, 0 where there is no tensor.

    Where the first input is a list with an item a sample (images of unlike size), so many items: another input then has as many
    items or rows.

    Args:
        inputs: Tensors in tuples, lists and dicts.
    """
    import torch

    from rlplace.model.axes.access import tensors_in

    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    first = next(tensors_in(inputs), None)
    if first is None:
        return 0
    rows = max(1, int(first.shape[0])) if first.dim() else 1
    leading, *others = _arguments(inputs) or [first]
    lengths = [len(value) for value in others if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim())]
    if isinstance(leading, list) and len(leading) in lengths and rows not in lengths:
        return len(leading)
    return rows


def _arguments(inputs: Any) -> list[Any]:
    """What a forward is called with, whether a tuple, a dict, or a pair of both."""
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return [*inputs[0], *inputs[1].values()]
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def resize_batch(inputs: Any, samples: int, wanted: int) -> Any:
    """Example inputs with another batch size: every tensor whose first dimension is `samples` is cut or repeated.

    Args:
        inputs: Tensors in tuples, lists and dicts.
        samples: Batch size of `inputs`.
        wanted: Batch size of the result.
    """
    import torch

    from rlplace.model.axes.access import tensors_in
    from rlplace.model.torch_adapter import pytree

    def resized(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dim() == 0 or leaf.shape[0] != samples or samples == wanted:
            return leaf
        return leaf.repeat(-(-wanted // samples), *([1] * (leaf.dim() - 1)))[:wanted]

    def items(value: Any) -> bool:
        """Returns whether a list has an item a sample."""
        return listed and isinstance(value, list) and len(value) == samples

    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    listed = any(isinstance(value, list) and len(value) == samples for value in _arguments(inputs)[:1])
    listed = listed and rows_of(next(tensors_in(inputs), inputs)) != samples
    leaves, spec = pytree.tree_flatten(inputs, is_leaf=items)
    made = [(leaf * -(-wanted // samples))[:wanted] if items(leaf) else leaf for leaf in leaves]
    made = [resized(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in made]
    return pytree.tree_unflatten(made, spec)


def at_batch(graph: OpGraph, capture_at: Callable[[int], OpGraph] | None, batch: int | None, microbatch: int | None) -> OpGraph:
    """Returns the graph of a step that a placement runs as one pass; unchanged where no size is asked for.

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
