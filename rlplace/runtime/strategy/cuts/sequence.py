"""Whether the activations between the regions of a block can be split along the sequence, and what then reads them in parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rlplace.model.aten import kind_of
from rlplace.model.capture.export import is_random, module_path
from rlplace.runtime.strategy.cuts.follow import RefusedError, along
from rlplace.runtime.strategy.cuts.regions import BlockGraph, Region

SEQUENCE = 1
"""Dimension of an activation that is split along the sequence."""


def sequence_modules(block: nn.Module, graph: BlockGraph, regions: Sequence[Region]) -> tuple[str, ...]:
    """Returns modules whose parameters are read by positions: their gradients are summed over the parts.

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
    split, modules = {inputs[0]: SEQUENCE}, set[str]()
    for node in graph.graph.nodes:
        path = module_path(node)
        if path in rows and any(value in inside or value in split for value in node.all_input_nodes):
            split[node] = SEQUENCE
        elif node in inside or path in columns or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        elif any(value in split for value in node.all_input_nodes):
            name = getattr(node.target, "_opname", "") or node.name
            if (
                node in graph.products
                or (kind_of(name) == "view" and name != "alias")
                or along(node, split, lambda value: False) != SEQUENCE
            ):
                raise RefusedError(f"{name} may mix positions")
            split[node] = SEQUENCE
            parameters = (path for value in node.all_input_nodes for path in graph.behind.get(value, ()))
            modules |= {parameter.rpartition(".")[0] for parameter in parameters}
    if any(is_random(node) for node in graph.graph.nodes if node not in split and node not in inside):
        raise RefusedError("it draws numbers for a whole value")
    unsplit = [product.module for node, product in graph.products.items() if node not in inside and product.module not in rows]
    if unsplit:
        raise RefusedError(f"{', '.join(unsplit)} has no layout")
    for path in modules:
        if not path or any(True for _ in block.get_submodule(path).children()):
            raise RefusedError("a module with modules of its own reads parameters by positions")
    return tuple(sorted(modules))
