"""Which index of an op runs along which dimension of which tensor: the input of tensor layouts.

An op is described by an iteration space of named dimensions, as in an einsum: ``linear`` has rows m (one a leading dimension of
its input), columns n and a reduction k, and reads its input by (m, k), its weight by (n, k), and writes its output by (m, n).
Only dimensions that can be cut are named: cutting one into parts and giving each device one part of every tensor that it
indexes leaves the op's work the same, but for sums over the parts where an output is not indexed by the dimension.

Tensors are described in memory, by the strides of the view that the op sees, so that views need no rules: after
``view(b, s, heads, width)`` the same storage is read with other strides. Rules are not guessed: ops without
one cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from rlplace.model.aten import base_name, kind_of
from rlplace.model.graph.indices import Access, Names, Use


@dataclass
class IterationSpace:
    """The iteration space that a rule fills in."""

    dims: dict[str, int] = field(default_factory=dict)
    tensors: list[tuple[Any, Names]] = field(default_factory=list)
    statistics: list[tuple[Names, int]] = field(default_factory=list)

    def add(self, tensor: Any, names: Sequence[str]) -> None:
        """Adds a tensor with the names of its dimensions; sizes are taken from it."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.dim() != len(names):
            return
        for name, size in zip(names, tensor.shape, strict=True):
            if name:
                self.dims[name] = max(self.dims.get(name, 1), int(size))
        self.tensors.append((tensor, tuple(names)))


Rule = Callable[[IterationSpace, Sequence[Any], Any], bool]
"""Fills in a space from arguments and result; False when it does not know this call."""


def access_of(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, storage: Callable[[torch.Tensor], int]
) -> Access | None:
    """Returns the iteration space of a call, None where no rule knows it.

    Args:
        target: The ATen op.
        args: Its positional arguments, on fake tensors.
        kwargs: Its keyword arguments.
        result: Its result.
        storage: Numbers the storage of a tensor.
    """
    rule = rule_of(target)
    space = IterationSpace()
    try:
        if rule is None or not rule(space, _in_order(target, args, kwargs), result):
            return None
    except GuardOnDataDependentSymNode:  # sizes that depend on values, as of ``nonzero``, have no parts
        return None
    dims = {name: size for name, size in space.dims.items() if size > 1}
    held = [(tensor, names) for tensor, names in space.tensors if tensor.untyped_storage().nbytes() > 0]
    uses = tuple(_use(tensor, names, dims, storage) for tensor, names in held)
    statistics = tuple((tuple(n for n in names if n in dims), size) for names, size in space.statistics)
    return Access(dims, uses, statistics) if dims and uses else None


def rule_of(target: Any) -> Rule | None:
    """Returns the rule for an ATen op."""
    from rlplace.model.axes.access_rules import RULES, elementwise

    name = base_name(str(target))
    if name in RULES:
        return RULES[name]
    if torch.Tag.pointwise in getattr(target, "tags", ()) or name in _POINTWISE:
        return elementwise
    return _view if kind_of(name) == "view" else None


_POINTWISE = frozenset(
    {"contiguous", "clone", "to", "_to_copy", "zeros_like", "ones_like", "full_like", "fill_", "copy_", "detach", "alias",
     "type_as", "dropout", "native_dropout", "dropout_", "where", "masked_fill", "masked_fill_", "__and__", "__or__", "__xor__",
     "hardswish", "softplus"}
)  # fmt: skip
"""Each element of the result depends on the same element of the arguments, though torch does not tag them so."""


def _in_order(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns arguments in positional order, keywords and defaults filled in where the schema is known."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return [*args, *kwargs.values()]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in schema.arguments[len(args) :])]


def _use(tensor: torch.Tensor, names: Names, dims: Mapping[str, int], storage: Callable[[torch.Tensor], int]) -> Use:
    runs = tuple(
        (name, int(size), int(stride))
        for name, size, stride in zip(names, tensor.shape, tensor.stride(), strict=True)
        if name in dims and size == dims[name] and stride > 0
    )
    return Use(storage(tensor), tensor.untyped_storage().nbytes() // max(1, tensor.element_size()), runs)


def numbered(prefix: str, count: int) -> Names:
    """Returns ``("m",)`` for one dimension, else ``("m0", "m1", ...)``."""
    return (prefix,) if count == 1 else tuple(f"{prefix}{index}" for index in range(count))


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yields tensors in nested lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


def _view(space: IterationSpace, args: Sequence[Any], result: Any) -> bool:
    """Names the dimensions of a view's base; a reshape that has to copy is a view of either side."""
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return False
    output = next(tensors_in(result), None)
    if output is None or output.untyped_storage()._cdata == first.untyped_storage()._cdata:
        space.add(first, numbered("d", first.dim()))
        return True
    return _reshape(space, first, output)


def _reshape(space: IterationSpace, source: torch.Tensor, output: torch.Tensor) -> bool:
    """Adds both sides of a reshape in their finest common shape."""
    if source.numel() != output.numel() or source.numel() == 0:
        return False
    common = _common_shape(source.shape, output.shape)
    if common is None:
        return False
    names = numbered("d", len(common))
    for tensor in (source, output):
        space.add(tensor.view(common), names)  # needs no copy
    return True


def _common_shape(left: Sequence[int], right: Sequence[int]) -> list[int] | None:
    """Returns the finest shape that both are row-major groupings of; None when their borders cross."""
    borders: set[int] = set()
    for shape in (left, right):
        inner = 1
        for size in reversed(shape):
            inner *= int(size)
            borders.add(inner)
    ordered = sorted(borders | {1})
    if any(high % low for low, high in pairwise(ordered)):
        return None
    return [high // low for low, high in pairwise(ordered)][::-1] or None
