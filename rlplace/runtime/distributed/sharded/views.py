"""Views of spread tensors: how the pieces of the result lie, and which call makes them from the pieces at hand.

A view moves nothing. Where it would have to cut through a factor that is spread over devices, it names the mesh axes that have
to be gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from rlplace.graph.kinds import base_name
from rlplace.runtime.distributed.sharded.spec import WHOLE, Factor, Spec, normal

Shape = tuple[int, ...]
Call = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Viewed:
    """A view of a spread tensor.

    Attributes:
        gather: Mesh axes to gather first; then the rest is void.
        specs: Layouts of the results.
        call: Makes the local results from the local tensor.
    """

    gather: frozenset[int] = frozenset()
    specs: tuple[Spec, ...] = ()
    call: Call | None = None


def is_view_op(target: Any) -> bool:
    """Whether `view` knows the op."""
    return base_name(str(target)) in _VIEWS and not str(target).endswith(".dtype")


def view(target: Any, args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    """The view of a tensor.

    Args:
        target: ATen op with `is_view_op`.
        args: All its arguments but the tensor, in order, keyword ones and defaults included.
        spec: Layout of the tensor.
        shapes: Shapes of the whole results.
    """
    return _VIEWS[base_name(str(target))](args, spec, shapes)


def regroup(dims: Sequence[Sequence[Factor]], shape: Shape) -> tuple[tuple[Factor, ...], ...] | frozenset[int]:
    """The same factors as the dimensions of another shape; or the axes whose factors stand in the way."""
    left = list(normal(factor for factors in dims for factor in factors))
    grouped: list[tuple[Factor, ...]] = []
    for wanted in shape:
        own: list[Factor] = []
        need = wanted
        while need > 1:
            if not left:
                return _axes(dims)
            size, axis = left[0]
            if need % size == 0:
                own.append(left.pop(0))
                need //= size
            elif axis == WHOLE and size % need == 0:
                own.append((need, WHOLE))
                left[0] = (size // need, WHOLE)
                need = 1
            else:
                return _axes(dims)
        grouped.append(normal(own))
    return tuple(grouped)


def _axes(dims: Sequence[Sequence[Factor]]) -> frozenset[int]:
    return frozenset(axis for factors in dims for _, axis in factors if axis != WHOLE)


def _reshape(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    if 0 in shapes[0]:
        return Viewed(spec.axes) if spec.axes else Viewed(specs=(_empty(shapes[0], spec),), call=lambda x: x.reshape(shapes[0]))
    dims = _nearest(spec.dims, shapes[0])
    if isinstance(dims, frozenset):
        return Viewed(dims)
    result = Spec(dims, spec.partial)
    return Viewed(specs=(result,), call=lambda x: x.reshape(result.local_shape))


def _nearest(dims: tuple[tuple[Factor, ...], ...], shape: Shape) -> tuple[tuple[Factor, ...], ...] | frozenset[int]:
    """As `regroup`; gathers no more axes than it has to, inner ones first."""
    grouped = regroup(dims, shape)
    if not isinstance(grouped, frozenset):
        return grouped
    for axis in sorted(grouped, reverse=True):
        rest = Spec(dims).gathered({axis}).dims
        if not isinstance(regroup(rest, shape), frozenset):
            return frozenset({axis})
    return grouped


def _empty(shape: Shape, spec: Spec) -> Spec:
    return Spec(tuple(normal([(size, WHOLE)]) for size in shape), spec.partial)


def _permuted(order: Sequence[int], spec: Spec) -> Viewed:
    return Viewed(specs=(Spec(tuple(spec.dims[d] for d in order), spec.partial),), call=lambda x: x.permute(tuple(order)))


def _permute(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    return _permuted([int(d) % len(spec.dims) for d in args[0]], spec)


def _transpose(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    count = len(spec.dims)
    order = list(range(count))
    if count:
        first, second = int(args[0]) % count, int(args[1]) % count
        order[first], order[second] = second, first
    return _permuted(order, spec)


def _turned(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    """``t``, ``numpy_T``: the dimensions the other way round."""
    return _permuted(range(len(spec.dims))[::-1], spec)


def _same(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    return Viewed(specs=(spec,), call=lambda x: x)


def _detached(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    return Viewed(specs=(spec,), call=lambda x: x.detach())


def _expand(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    new = len(shapes[0]) - len(spec.dims)
    dims = [
        spec.dims[d - new] if d >= new and spec.shape[d - new] == size else normal([(size, WHOLE)])
        for d, size in enumerate(shapes[0])
    ]
    result = Spec(tuple(dims), spec.partial)
    return Viewed(specs=(result,), call=lambda x: x.expand(result.local_shape))


def _narrowed(dim: int, spec: Spec, bounds: Sequence[tuple[int, int]], keep: bool = True) -> Viewed:
    """Pieces ``[start, end)`` of one dimension: where they are bounded by factors outside of all that are spread."""
    factors = spec.dims[dim]
    spread = any(axis != WHOLE for _, axis in factors)
    inner, rest = 1, factors
    if spread:
        if all(start == 0 and end == spec.shape[dim] for start, end in bounds):
            return _whole(spec, len(bounds))
        if factors[0][1] != WHOLE:
            return Viewed(_axes([factors]))
        rest = factors[1:]
        inner = prod(size for size, _ in rest)
        if any(start % inner or end % inner for start, end in bounds):
            return Viewed(_axes([factors]))
    local_inner = prod(size for size, axis in rest if axis == WHOLE) if spread else 1
    specs = []
    for start, end in bounds:
        own = normal([((end - start) // inner, WHOLE), *(rest if spread else ())]) if end > start else ((0, WHOLE),)
        specs.append(Spec((*spec.dims[:dim], *((own,) if keep else ()), *spec.dims[dim + 1 :]), spec.partial))
    scaled = [(start // inner * local_inner, (end - start) // inner * local_inner) for start, end in bounds]

    def call(x: torch.Tensor) -> Any:
        parts = [x.narrow(dim, start, length) for start, length in scaled]
        return [part.squeeze(dim) for part in parts] if not keep else parts

    return Viewed(specs=tuple(specs), call=call)


def _whole(spec: Spec, count: int) -> Viewed:
    return Viewed(specs=(spec,) * count, call=lambda x: [x] * count)


def _first(viewed: Viewed) -> Viewed:
    call = viewed.call
    return viewed if call is None else Viewed(specs=viewed.specs, call=lambda x: call(x)[0])


def _slice(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    dim = int(args[0] or 0) % len(spec.dims)
    size = spec.shape[dim]
    start = 0 if args[1] is None else int(args[1])
    step = 1 if len(args) < 4 or args[3] is None else int(args[3])
    start = min(max(start + size if start < 0 else start, 0), size)
    if step != 1:
        axes = _axes([spec.dims[dim]])
        if axes:
            return Viewed(axes)
        dims = list(spec.dims)
        dims[dim] = normal([(shapes[0][dim], WHOLE)])
        index = (slice(None),) * dim + (slice(start, start + shapes[0][dim] * step, step),)
        return Viewed(specs=(Spec(tuple(dims), spec.partial),), call=lambda x: x[index])
    return _first(_narrowed(dim, spec, [(start, start + shapes[0][dim])]))


def _narrow(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    return _slice([args[0], args[1], None, 1], spec, shapes)


def _select(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    dim = int(args[0]) % len(spec.dims)
    index = int(args[1]) % spec.shape[dim]
    axes = _axes([spec.dims[dim]])
    return Viewed(axes) if axes else _first(_narrowed(dim, spec, [(index, index + 1)], keep=False))


def _split(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    """``split``, ``split_with_sizes``, ``chunk``: the shapes of the results say where."""
    dim = int(args[1] if len(args) > 1 and args[1] is not None else 0) % len(spec.dims)
    bounds, start = [], 0
    for shape in shapes:
        bounds.append((start, start + shape[dim]))
        start += shape[dim]
    return _narrowed(dim, spec, bounds)


def _unbind(args: Sequence[Any], spec: Spec, shapes: Sequence[Shape]) -> Viewed:
    dim = int(args[0] if args and args[0] is not None else 0) % len(spec.dims)
    axes = _axes([spec.dims[dim]])
    return Viewed(axes) if axes else _narrowed(dim, spec, [(i, i + 1) for i in range(len(shapes))], keep=False)


_VIEWS: dict[str, Callable[[Sequence[Any], Spec, Sequence[Shape]], Viewed]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "flatten", "unflatten", "view_as", "ravel"), _reshape),
    "unsqueeze": _reshape, "squeeze": _reshape,
    "permute": _permute, "transpose": _transpose, "swapaxes": _transpose, "t": _turned, "numpy_T": _turned,
    "expand": _expand, "expand_as": _expand,
    "slice": _slice, "narrow": _narrow, "select": _select,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split), "unbind": _unbind,
    "alias": _same, "detach": _detached,
}  # fmt: skip
