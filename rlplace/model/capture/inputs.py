"""Example inputs of a step: as call arguments, as JSON, and with another number of samples.

The JSON (structure, shapes and dtypes) stays in the ``source`` of a graph, of its problems and of their plans, so that a plan
can be executed without example inputs at hand. Every part is an object with one key for its type: ``tensor`` (its shape, with
``dtype`` beside it), ``tuple``, ``list``, ``dict`` or ``value`` (a plain argument).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, show

if TYPE_CHECKING:
    from rlplace.model.graph.opgraph import OpGraph

MAX_PARTS = 1000
"""Inputs of more parts are not described."""

_PLAIN = (bool, int, float, str, type(None))


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits example inputs (a dict by keyword, a tuple or list, or one tensor) into positional and keyword arguments.

    Raises:
        InputError: The inputs are something else.
    """
    import torch

    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):  # a tokenizer's BatchEncoding, too
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise InputError(f"example_inputs: expected a dict, a tuple or a tensor, found {type(inputs).__name__}")


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns arguments of a call without their values; None when they hold something that JSON cannot express.

    Args:
        args: Positional arguments: tensors and plain values, nested in tuples, lists and dicts.
        kwargs: Keyword arguments.
    """
    parts = [0]
    try:
        return {
            "args": [_describe(item, parts) for item in args],
            "kwargs": {k: _describe(v, parts) for k, v in kwargs.items()},
        }
    except _Indescribable:
        return None


def described_inputs(description: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that `describe_inputs` described, tensors on the meta device.

    Raises:
        InputError: The description is damaged.
    """
    if not isinstance(description, Mapping) or set(description) != {"args", "kwargs"}:
        raise InputError(f"inputs: expected an object with args and kwargs, found {show(description)}")
    args, kwargs = description["args"], description["kwargs"]
    if not isinstance(args, list) or not isinstance(kwargs, Mapping):
        raise InputError("inputs: expected args as a list and kwargs as an object")
    return tuple(_build(item) for item in args), {str(key): _build(item) for key, item in kwargs.items()}


class _Indescribable(Exception):
    pass


def _describe(item: Any, parts: list[int]) -> dict[str, Any]:
    import torch

    parts[0] += 1
    if parts[0] > MAX_PARTS:
        raise _Indescribable
    if isinstance(item, torch.Tensor):
        return {"tensor": [int(size) for size in item.shape], "dtype": str(item.dtype).removeprefix("torch.")}
    if type(item) in _PLAIN and item not in (float("inf"), float("-inf")) and item == item:
        return {"value": item}
    if type(item) in (tuple, list):
        return {type(item).__name__: [_describe(value, parts) for value in item]}
    if type(item) is dict and all(isinstance(key, str) for key in item):
        return {"dict": {key: _describe(value, parts) for key, value in item.items()}}
    raise _Indescribable


def _build(item: Any) -> Any:
    import torch

    if isinstance(item, Mapping):
        match dict(item):
            case {"tensor": list(shape), "dtype": str(dtype), **rest} if not rest:
                kind = getattr(torch, dtype, None)
                if not isinstance(kind, torch.dtype):
                    raise InputError(f"inputs: {show(dtype)} is no dtype of torch")
                if all(type(size) is int and size >= 0 for size in shape):
                    try:
                        return torch.empty(shape, dtype=kind, device="meta")
                    except (RuntimeError, OverflowError, TypeError):
                        raise InputError(f"inputs: a tensor of shape {show(shape)} is larger than torch can name") from None
            case {"value": value, **rest} if not rest and type(value) in _PLAIN:
                return value
            case {"tuple": list(values), **rest} if not rest:
                return tuple(_build(value) for value in values)
            case {"list": list(values), **rest} if not rest:
                return [_build(value) for value in values]
            case {"dict": dict(values), **rest} if not rest:
                return {str(key): _build(value) for key, value in values.items()}
    raise InputError(f"inputs: expected a tensor, value, tuple, list or dict, found {show(item)}")


def rows_of(inputs: Any, items: bool | None = None) -> int:
    """Counts the samples of example inputs: rows of their first tensor, 1 where it has no dimensions, 0 where there is no
    tensor.

    Where the first input is a list with an item a sample (images of unlike size), so many items: another input then has as many
    items or rows.

    Args:
        inputs: Tensors in tuples, lists and dicts.
        items: Whether samples are items of the first list, where that is known of other inputs of the model.
    """
    from rlplace.model.axes.access import tensors_in

    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    first = next(tensors_in(inputs), None)
    if first is None:
        return 0
    if are_items(inputs) if items is None else items:
        return next((len(value) for value in _arguments(inputs) if isinstance(value, list)), 0)
    return max(1, int(first.shape[0])) if first.dim() else 1


def are_items(inputs: Any) -> bool:
    """Returns whether samples are items of lists, and not rows of tensors."""
    import torch

    from rlplace.model.axes.access import tensors_in

    leading, *others = _arguments(inputs) or [None]
    if not isinstance(leading, list):
        return False
    alike = [value for value in others if isinstance(value, (list, torch.Tensor)) and length_of(value) == len(leading)]
    if any(isinstance(value, list) and not all(isinstance(item, torch.Tensor) for item in value) for value in alike):
        return True  # such as a dict of boxes for each image
    return bool(alike) and len({length_of(tensor) for tensor in tensors_in(inputs)} - {0}) > 1  # else a list of features, say


def length_of(value: Any) -> int:
    """Returns the items of a list, or the rows of a tensor; 0 for one without dimensions."""
    return len(value) if isinstance(value, list) or value.dim() else 0


def _arguments(inputs: Any) -> list[Any]:
    """Returns the arguments of a forward from a tuple, a dict, or a pair of both."""
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return [*inputs[0], *inputs[1].values()]
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def flatten_rows(inputs: Any, samples: int, items: bool | None = None) -> tuple[list[Any], list[bool], Any]:
    """Takes inputs apart into what has a row or an item for each sample, and what has not.

    Args:
        inputs: Tensors in tuples, lists and dicts.
        samples: How many there are.
        items: See `rows_of`.

    Returns:
        Leaves: tensors, other values, and whole lists where samples are items of lists; by leaf whether it is one a sample;
        and the structure for `pytree.tree_unflatten`.
    """
    import torch

    from rlplace.model.torch_adapter import pytree

    inputs = dict(inputs) if isinstance(inputs, Mapping) and not isinstance(inputs, dict) else inputs
    lists = are_items(inputs) if items is None else items
    leaves, spec = pytree.tree_flatten(inputs, is_leaf=lambda value: lists and isinstance(value, list))
    return leaves, [isinstance(leaf, (list, torch.Tensor)) and length_of(leaf) == samples for leaf in leaves], spec


def resize_batch(inputs: Any, samples: int, wanted: int) -> Any:
    """Cuts or repeats every tensor of example inputs whose first dimension is `samples`, or every list of so many items.

    Args:
        inputs: Tensors in tuples, lists and dicts.
        samples: Batch size of `inputs`.
        wanted: Batch size of the result.
    """
    from rlplace.model.torch_adapter import pytree

    def resized(leaf: Any) -> Any:
        times = -(-wanted // samples)
        return (leaf * times if isinstance(leaf, list) else leaf.repeat(times, *([1] * (leaf.dim() - 1))))[:wanted]

    leaves, each, spec = flatten_rows(inputs, samples)
    made = [resized(leaf) if one and samples != wanted else leaf for leaf, one in zip(leaves, each, strict=True)]
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
    if samples is None or samples == graph.samples:
        return graph
    if capture_at is None:
        raise InputError(
            f"place: the graph has {graph.samples} samples, {samples} are asked for; place the module, or capture it so"
        )
    return capture_at(samples)


def samples_of_pass(batch: int | None, microbatch: int | None) -> int | None:
    """Returns the samples of the one pass of a placement, by either number; None where neither is given.

    Raises:
        InputError: The two differ.
    """
    if None not in (batch, microbatch) and batch != microbatch:
        raise InputError(
            f"batch: a placement runs its {batch} samples in one pass, not in micro-batches of {microbatch}; leave one out, or "
            "plan a whole strategy"
        )
    return microbatch if batch is None else batch
