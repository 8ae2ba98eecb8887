"""How a cut dimension passes an op."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from rlplace.graph.export import module_path

if TYPE_CHECKING:
    from rlplace.runtime.native.layouts import BlockGraph, Trail

_POINTWISE = {"to", "_to_copy", "clone", "contiguous", "alias", "detach", "dropout", "silu", "gelu", "relu", "expand"}
_RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten"}
_BY_DIM = {"softmax", "_softmax", "select", "slice", "mean", "sum", "cat"}


class RefusedError(Exception):
    """A cut cannot pass an op."""


def draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers."""
    name = getattr(node.target, "_opname", "")
    if name == "dropout":
        return bool(node.args[1] and node.args[2])
    if name == "scaled_dot_product_attention":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p"))
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def follow(node: fx.Node, trail: Trail, block: BlockGraph) -> int | None:
    """The cut dimension of what a node makes; None where it makes no tensor.

    Raises:
        RefusedError: The op mixes what the cut separates, or its gradient would be a partial sum.
    """
    name = getattr(node.target, "_opname", "")
    if node.target is operator.getitem:
        return trail.cut[node.args[0]]  # type: ignore[index]
    if name in ("split", "split_with_sizes", "chunk"):
        return _packed(node, trail, block)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (tuple, list)) or node.op != "call_function":
            raise RefusedError(f"nothing is known of {node.name}")
        return None
    before = [item for item in node.all_input_nodes if item in trail.cut]
    first, dim = before[0], trail.cut[before[0]]
    shape = first.meta["val"].shape
    if name in _RESHAPES:
        return _reshaped(node, shape, dim, tuple(value.shape), trail)
    if name in ("transpose", "permute", "t", "unsqueeze", "squeeze"):
        return _moved(node, name, dim, len(shape))
    if name in _BY_DIM:
        _check_by_dim(node, name, dim, shape)
        return _aligned(node, trail, block, value.dim()) if name == "cat" else dim - _dropped(node, name, dim, len(shape))
    if name == "scaled_dot_product_attention" or name in ("matmul", "bmm"):
        if any(len(item.meta["val"].shape) - trail.cut[item] < 3 for item in before):
            raise RefusedError(f"{name} mixes the cut dimension")
        return _aligned(node, trail, block, value.dim())
    if name in _POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return _aligned(node, trail, block, value.dim())
    raise RefusedError(f"a cut through {name or node.name} is not known")


def _aligned(node: fx.Node, trail: Trail, block: BlockGraph, dims: int) -> int:
    """All operands are cut on the same dimension, counted from the last, or have nothing to cut there."""
    ends = {trail.cut[item] - item.meta["val"].dim() for item in node.all_input_nodes if item in trail.cut}
    if len(ends) > 1:
        raise RefusedError(f"{node.name} reads values that are cut on unlike dimensions")
    end = ends.pop()
    for item in node.all_input_nodes:
        value = item.meta.get("val")
        if item in trail.cut or not isinstance(value, torch.Tensor):
            continue
        if value.dim() >= -end and value.shape[end] != 1:
            raise RefusedError(f"{node.name} reads a whole value beside parts")
        if item in block.live:
            raise RefusedError(f"the gradient of {item.name} would be a partial sum")
    return dims + end


def _reshaped(node: fx.Node, shape: Any, dim: int, made: tuple[int, ...], trail: Trail) -> int:
    """The cut dimension stays outermost of what it is split into, or of what it is merged with."""
    given: Any = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else ()
    ahead = 1
    for size in shape[:dim]:
        ahead *= size
    done = 1
    for position, size in enumerate(made):
        if done == ahead and size != 1:
            if shape[dim] % size and size % shape[dim]:
                break
            trail.sizes.add(min(size, shape[dim]))
            if -1 in given and given.index(-1) != position:  # a whole number of heads would be made up for elsewhere
                trail.stored.append((module_path(node), "num_heads"))
            return position
        done *= size
    raise RefusedError(f"{node.name} takes the cut dimension apart")


def _moved(node: fx.Node, name: str, dim: int, dims: int) -> int:
    arguments = [item for item in node.args[1:]]
    if name == "permute":
        return [int(item) % dims for item in arguments[0]].index(dim)  # type: ignore[union-attr, arg-type]
    if name in ("transpose", "t"):
        one, other = (int(item) % dims for item in (arguments or (0, 1)))  # type: ignore[arg-type]
        return {one: other, other: one}.get(dim, dim)
    place = int(arguments[0]) % (dims + (name == "unsqueeze"))  # type: ignore[arg-type]
    if name == "unsqueeze":
        return dim + (place <= dim)
    if place == dim:
        raise RefusedError(f"{node.name} takes the cut dimension away")
    return dim - (place < dim)


def _check_by_dim(node: fx.Node, name: str, dim: int, shape: Any) -> None:
    default: Any = 0 if name in ("slice", "cat", "select") else None
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", default)
    listed = given if isinstance(given, (list, tuple)) else [dim if given is None else given]
    if dim not in {int(item) % len(shape) for item in listed}:
        return
    start, end = [*node.args[2:4], None, None][:2]
    if name != "slice" or start or not isinstance(end, int) or end < shape[dim] or len(node.args) > 4:
        raise RefusedError(f"{name} works along the cut dimension")


def _dropped(node: fx.Node, name: str, dim: int, dims: int) -> int:
    """Dimensions before the cut one that an op takes away."""
    if name == "select":
        return int(int(node.args[1]) % dims < dim)  # type: ignore[arg-type]
    if name in ("mean", "sum") and not (len(node.args) > 2 and node.args[2]):
        return sum(int(item) % dims < dim for item in node.args[1])  # type: ignore[union-attr, arg-type]
    return 0


def _packed(node: fx.Node, trail: Trail, block: BlockGraph) -> int:
    """A split of the cut dimension: the weight packs several, and each is cut for itself."""
    value: Any = node.args[0]
    dim = trail.cut[value]
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
    trail.packed[product.module] = len(node.meta["val"])
    trail.sizes.add(size)
    if getattr(node.target, "_opname", "") == "split":
        trail.stored.append((module_path(node), "split_size"))
    return dim
