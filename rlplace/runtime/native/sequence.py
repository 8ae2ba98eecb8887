"""Whether the activations between the regions of a block can be split along the sequence, and what then reads them in parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from rlplace.graph.export import module_path
from rlplace.runtime.native.follow import RefusedError, draws
from rlplace.runtime.native.layouts import BlockGraph, Region

_LAST_DIM = {"mean", "sum", "var"}
_NORMS = {"layer_norm", "native_layer_norm", "rms_norm"}
_ALSO = {"to", "_to_copy", "clone", "contiguous", "alias", "dropout"}


def sequence_modules(block: nn.Module, graph: BlockGraph, regions: Sequence[Region]) -> tuple[str, ...]:
    """Modules whose parameters are read by positions: their gradients are summed over the parts.

    Raises:
        RefusedError: An op between the regions mixes positions, or parts would differ in what they draw.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder" and node in graph.live]
    if len(inputs) != 1 or inputs[0].meta["val"].dim() != 3:
        raise RefusedError("it does not read one activation of samples x positions x width")
    inside = {node for region in regions for node in region.nodes}
    rows = {product.module for region in regions for product in region.rows}
    columns = {product.module for region in regions for product in region.columns}
    if any(not region.entry for region in regions):
        raise RefusedError("no module takes in what several products read")
    split, modules = {inputs[0]}, set()
    for node in graph.graph.nodes:
        path = module_path(node)
        before = [value for value in node.all_input_nodes if value in split]
        if path in rows and any(value in inside or value in split for value in node.all_input_nodes):
            split.add(node)
        elif not before or node in inside or path in columns or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        else:
            _check(node, before, split)
            split.add(node)
            read = (graph.parameters[value] for value in node.all_input_nodes if value in graph.parameters)
            modules |= {parameter.rpartition(".")[0] for parameter in read}
    if any(draws(node) for node in graph.graph.nodes if node not in split and node not in inside):
        raise RefusedError("it draws numbers for a whole value")
    unsplit = [product.module for node, product in graph.products.items() if node not in inside and product.module not in rows]
    if unsplit:
        raise RefusedError(f"{', '.join(unsplit)} has no layout")
    for path in modules:
        if not path or any(True for _ in block.get_submodule(path).children()):
            raise RefusedError("a module with modules of its own reads parameters by positions")
    return tuple(sorted(modules))


def _check(node: fx.Node, before: list[fx.Node], split: set[fx.Node]) -> None:
    """Every position is worked on by itself."""
    name = getattr(node.target, "_opname", "")
    if name in _LAST_DIM and set(node.args[1]) <= {-1, 2}:  # type: ignore[arg-type]
        return
    if name in _NORMS and len(node.args[1]) == 1:  # type: ignore[arg-type]
        return
    if name not in _ALSO and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        raise RefusedError(f"{name or node.name} may mix positions")
    for value in node.all_input_nodes:
        other = value.meta.get("val")
        if value not in split and isinstance(other, torch.Tensor) and other.dim() > 1 and other.shape[-2] != 1:
            raise RefusedError(f"{node.name} reads a whole value beside parts of the sequence")
