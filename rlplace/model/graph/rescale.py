"""The graph of a model at any batch size, from captures at two.

FLOPs, bytes and sizes of named dimensions of a step are affine in the batch: a part for every sample (activations) and a part
that does not depend on it (weights, updates). Two captures of equal structure give both parts, op by op and tensor by tensor;
where a model computes on pairs of samples (a contrastive loss) this is wrong, and a third capture tells.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import CaptureError, InputError, show, whole_number
from rlplace.limits import MAX_BYTES
from rlplace.memoized import memoized
from rlplace.model.graph.opgraph import FORWARD, OpGraph

_EQUAL = ("op_names", "op_module", "op_phase", "op_forward", "op_parameter", "op_colocate")
_EQUAL_TENSORS = ("tensor_role", "tensor_parameter", "tensor_producer", "consumer_ptr", "consumers")
_AFFINE = ("op_flops", "op_bytes", "op_temporary_bytes", "tensor_bytes")
_NEAREST = ("op_target", "op_kind", "op_dtype", "op_launches")
"""Dims of the kernel that dominates an op, which may change with the batch."""


class CaptureAt(Protocol):
    """A function that captures a model with a number of samples, by one method or by the first that can."""

    def __call__(self, samples: int, method: str | None = None, /) -> OpGraph:
        """The capture."""


def two_captures(whole: OpGraph, capture_at: CaptureAt) -> tuple[OpGraph, OpGraph]:
    """Captures at two batch sizes above one, which together give all sizes; the first is `whole` where it is one of them.

    A model that loops over its samples has other ops at another size: both captures are then by modules, where such a loop is
    one op.

    Raises:
        InputError: The second has another number of samples than was asked for, the model does not run with it, or even its
            modules are called as often as there are samples.
    """
    rows = whole.samples
    try:
        first = whole if rows > 1 else capture_at(2)
        asked = first.samples // 2 if first.samples >= 4 else 2 * first.samples
        other = capture_at(asked)
        if other.samples == asked and not _alike(first, other):
            first, other = capture_at(first.samples, "module"), capture_at(asked, "module")
    except CaptureError as error:
        raise InputError(
            f"the model runs with {rows} samples, the rows of the first tensor of its inputs, but not with others: {error}; "
            "the first tensor must have one row a sample, or place a capture, which has this size only: "
            "rlplace.place(rlplace.capture(model, inputs), ...)"
        ) from error
    if other.samples != asked:
        raise InputError(
            f"{whole.name[:80]}: a batch of {asked} is asked for, and the first tensor of its inputs has {other.samples} rows; "
            "that tensor must have one row a sample"
        )
    if not _alike(first, other):
        counts = f"{first.num_ops} ops for {first.samples}, {other.num_ops} for {asked}"
        raise InputError(
            f"{whole.name[:80]}: it runs modules sample by sample ({counts}): run all at once; or place groups of this one "
            "batch: --space placement"
        )
    return first, other


def _alike(first: OpGraph, other: OpGraph) -> bool:
    return (first.num_ops, first.num_tensors) == (other.num_ops, other.num_tensors)


def rescale(small: OpGraph, large: OpGraph, samples: int) -> OpGraph:
    """Returns the graph at another batch size.

    Args:
        small: A capture.
        large: Another capture of the same model and options, at another batch size. Batches of two and more are safe; with one
            sample some models take other paths.
        samples: Batch size of the result. At one sample the result keeps the path that larger batches take.

    Returns:
        The graph with `samples` samples. Where a quantity is affine in the batch, which all are but some peaks of temporary
        bytes, it equals that of a capture; it is rounded to whole bytes otherwise. The kind of an op is that of the capture
        nearer in size: in tiny models it can change with the batch.

    Raises:
        InputError: The structures differ, both have the same batch, or a quantity would become negative.
    """
    whole_number(samples, "rescale: samples", 1)
    if small.samples == large.samples:
        raise InputError(f"rescale: both graphs have {small.samples} samples; capture the model at two batch sizes")
    _check_structure(small, large)
    fields: dict[str, Any] = {}
    for name in _AFFINE:
        values = affine(getattr(small, name), getattr(large, name), small.samples, large.samples, samples)
        if (values < 0).any():
            index = int(np.flatnonzero(values < 0)[0])
            known = [f"{getattr(graph, name)[index]} at {graph.samples}" for graph in (small, large)]
            raise InputError(
                f"rescale: {name}[{index}] is {' and '.join(known)} samples and would be negative at {samples}; "
                "capture the model nearer to it"
            )
        fields[name] = values
    near = min(small, large, key=lambda graph: abs(math.log(graph.samples / samples)))
    fields |= {name: getattr(near, name) for name in _NEAREST}
    return dataclasses.replace(
        small,
        samples=samples,
        op_dims=_scaled_dims(small, large, samples),
        source=None,  # it was not captured
        traced=None,  # its sizes are those of the captured batch
        **fields,
    )


def affine(a: NDArray[Any], b: NDArray[Any], at_a: int, at_b: int, at: int) -> NDArray[Any]:
    """Returns values at `at` on the line through `a` and `b`, exact where its slope is whole; integers are rounded where it is
    not.
    """
    slope, rest = np.divmod(b - a, at_b - at_a)
    if a.dtype.kind == "i" and np.abs(slope.astype(np.float64)).max(initial=1.0) * abs(at - at_a) > MAX_BYTES:
        raise InputError(f"rescale: {show(at)} samples are more than a graph can count; use fewer")
    part = rest / (at_b - at_a) * (at - at_a)
    return a + slope * (at - at_a) + (np.rint(part).astype(a.dtype) if a.dtype.kind == "i" else part)


def _scaled_dims(small: OpGraph, large: OpGraph, samples: int) -> dict[int, dict[str, int]]:
    both = [[graph.op_dims[op][name] for op, dims in small.op_dims.items() for name in dims] for graph in (small, large)]
    a, b = (np.array(sizes, dtype=np.int64) for sizes in both)
    scaled = iter(affine(a, b, small.samples, large.samples, samples).tolist())
    return {op: {name: next(scaled) for name in dims} for op, dims in small.op_dims.items()}


def check_counts(small: OpGraph, large: OpGraph) -> str:
    """Refuses two graphs with unlike numbers of ops, tensors or parameters; returns what to do about others that differ.

    Raises:
        InputError: They differ.
    """
    hint = "capture the same model with the same options, at batch sizes of two and more"
    for what, a, b in (
        ("ops", small.num_ops, large.num_ops),
        ("tensors", small.num_tensors, large.num_tensors),
        ("parameters", len(small.parameters), len(large.parameters)),
    ):
        if a != b:
            raise InputError(f"rescale: the graphs at {_sizes(small, large)} have {a} and {b} {what}; {hint}")
    return hint


def _sizes(small: OpGraph, large: OpGraph) -> str:
    return f"{small.samples} and {large.samples} samples"


@memoized
def _check_structure(small: OpGraph, large: OpGraph) -> None:
    """Refuses two graphs that are not one model's."""
    sizes, hint = _sizes(small, large), check_counts(small, large)
    for name in (*_EQUAL, "op_target"):
        a_ops, b_ops = (np.asarray(getattr(graph, name)) for graph in (small, large))
        differ = np.flatnonzero((a_ops != b_ops) & ((small.op_phase == FORWARD) | (name != "op_target")))
        if len(differ):
            op = int(differ[0])
            raise InputError(
                f"rescale: op {small.op_names[op][:80]!r} differs in {name} between {sizes}: "
                f"{show(a_ops[op].item())} and {show(b_ops[op].item())}; {hint}"
            )
    for a_parameter, b_parameter in zip(small.parameters, large.parameters, strict=True):
        if a_parameter != b_parameter:
            raise InputError(f"rescale: parameter {a_parameter.name[:80]!r} differs between {sizes}; {hint}")
    for name in _EQUAL_TENSORS:
        a_values, b_values = getattr(small, name), getattr(large, name)
        if not np.array_equal(a_values, b_values):
            raise InputError(f"rescale: {name} differs between {sizes}: the ops pass on other tensors; {hint}")
    dims = [graph.op_dims for graph in (small, large)]
    if dims[0].keys() != dims[1].keys() or any(tuple(own) != tuple(dims[1][op]) for op, own in dims[0].items()):
        known = [{op: tuple(own) for op, own in some.items()} for some in dims]
        op = min(op for op in known[0].keys() | known[1].keys() if known[0].get(op) != known[1].get(op))
        raise InputError(f"rescale: op {small.op_names[op][:80]!r} has other named dimensions at {sizes}; {hint}")
