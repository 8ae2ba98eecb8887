"""How a cut dimension passes an op.

What runs along which dimension of an op's tensors say the rules that planning has (`rlplace.model.axes.access`); views keep the
extent in memory of a dimension that stays outermost of what it is split into, or of what it is merged with.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from rlplace.model.aten import kind_of
from rlplace.model.axes.access import access_of
from rlplace.model.capture.export import module_path

if TYPE_CHECKING:
    from rlplace.runtime.strategy.cuts.regions import BlockGraph, Region

_RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten"}
_VIEWS = {*_RESHAPES, "transpose", "permute", "t", "unsqueeze", "squeeze", "select", "slice", "expand"}


class RefusedError(Exception):
    """A cut cannot pass an op."""


def follow(node: fx.Node, region: Region, block: BlockGraph) -> int | None:
    """Returns the cut dimension of what a node makes; None where it makes no tensor.

    Raises:
        RefusedError: The op mixes what the cut separates, or its gradient would be a partial sum.
    """
    name = getattr(node.target, "_opname", "")
    if node.target is operator.getitem:
        return region.nodes[node.args[0]]  # type: ignore[index]
    if name in ("split", "split_with_sizes", "chunk"):
        return _packed(node, region, block)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (tuple, list)) or node.op != "call_function":
            raise RefusedError(f"nothing is known of {node.name}")
        return None
    if name in _VIEWS:
        return _viewed(node, region)
    return along(node, region.nodes, partial(_shared, region, block))


def _shared(region: Region, block: BlockGraph, value: fx.Node) -> bool:
    """Returns whether the gradient of a whole value beside parts is a partial sum that is not summed later."""
    owners = {path.rpartition(".")[0] for path in block.behind.get(value, ())}
    if len(owners) == 1 and owners <= {module_path(user) for user in value.users} and "" not in owners:
        region.local.update(owners)
        return False
    return value in block.live


def along(node: fx.Node, cut: Mapping[fx.Node, int], shared: Callable[[fx.Node], bool]) -> int:
    """Returns the dimension of what an op makes that its cut inputs are cut on.

    Args:
        node: Reads at least one of them, and makes one tensor.
        cut: Values to cut dimension.
        shared: Whether a whole input must not be read beside parts, because its gradient would be a partial sum.

    Raises:
        RefusedError: The op mixes parts, or is not known.
    """
    name = getattr(node.target, "_opname", "") or node.name
    if kind_of(name) == "view" and name not in ("alias", "detach"):
        raise RefusedError(f"{name} may take parts apart")
    held = {value: value.meta.get("val") for value in (node, *node.all_input_nodes)}
    made = {value: _contiguous(tensor) for value, tensor in held.items() if isinstance(tensor, torch.Tensor)}
    storage = {tensor.untyped_storage()._cdata: value for value, tensor in made.items()}
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda value: made.get(value, value.meta.get("val")))
    access = access_of(node.target, args, kwargs, made[node], lambda tensor: tensor.untyped_storage()._cdata)
    if access is None:
        raise RefusedError(f"a cut through {name} is not known")
    runs: dict[fx.Node, list[tuple[str, int, int]]] = {value: [] for value in made}
    for use in access.uses:
        if use.storage in storage:
            runs[storage[use.storage]] += use.runs
    dims: set[str] = set()
    for value, dim in cut.items():
        if value in made and value is not node:
            extent = made[value].shape[dim] * made[value].stride(dim)
            dims.add(next((n for n, size, step in runs[value] if size * step == extent), ""))
    (dim_name,) = dims if len(dims) == 1 else ("",)
    if not dim_name or any(dim_name not in names for names, _ in access.statistics):
        raise RefusedError(f"{name} mixes the cut dimension, or reads values that are cut on unlike ones")
    for value in made:
        if value is not node and value not in cut:
            if any(n == dim_name for n, _, _ in runs[value]):
                raise RefusedError(f"{node.name} reads a whole value beside parts")
            if shared(value):
                raise RefusedError(f"the gradient of {value.name} would be a partial sum")
    for n, size, step in runs[node]:
        if n == dim_name:
            return _place(made[node].shape, made[node].stride(), size * step, node)
    raise RefusedError(f"{name} works along the cut dimension")


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _place(shape: Any, strides: Any, extent: int, node: fx.Node) -> int:
    """Returns the dimension whose parts are parts of so many neighbours in memory."""
    found = [n for n, (size, step) in enumerate(zip(shape, strides, strict=True)) if size > 1 and size * step == extent]
    if len(found) != 1:
        raise RefusedError(f"{node.name} takes the cut dimension apart")
    return found[0]


def _viewed(node: fx.Node, region: Region) -> int:
    source: Any = node.args[0]
    name, dim, before, after = getattr(node.target, "_opname", ""), region.nodes[source], source.meta["val"], node.meta["val"]
    if name in _RESHAPES:
        before, after = _contiguous(before), _contiguous(after)
    place = _place(after.shape, after.stride(), before.shape[dim] * before.stride(dim), node)
    region.sizes.update((before.shape[dim], after.shape[place]))
    given: Any = node.args[1] if name in _RESHAPES and len(node.args) > 1 else ()
    if isinstance(given, (list, tuple)) and -1 in given and given.index(-1) != place:
        region.stored.add((module_path(node), "num_heads"))  # a whole number of heads would be made up for elsewhere
    return place


def _packed(node: fx.Node, region: Region, block: BlockGraph) -> int:
    """Returns a split of the cut dimension: the weight packs several, and each is cut for itself."""
    value: Any = node.args[0]
    dim = region.nodes[value]
    place = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if int(place) % value.meta["val"].dim() != dim:  # type: ignore[arg-type]
        return dim
    sizes = {part.shape[dim] for part in node.meta["val"]}
    source = value
    while source not in block.products and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if len(sizes) > 1 or source not in block.products:
        raise RefusedError(f"{node.name} splits the cut dimension into unlike parts")
    size, product = sizes.pop(), block.products[source]
    region.packed[product.module] = len(node.meta["val"])
    region.sizes.add(size)
    if getattr(node.target, "_opname", "") == "split":
        region.stored.add((module_path(node), "split_size"))
    return dim
