"""Tensor-parallel layouts of a block, derived from its graph.

A *region* starts where matrix products with weights read one value: their weights are cut by output (``column``), so what they
make is cut on its last dimension. The cut is followed through views (into heads), elementwise ops, attention and packed splits
to the products that sum over it, whose weights are cut by input (``row``) and whose partial sums end the region. What does not
fit leaves a region whole, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rlplace.model.capture.export import export_training_graph, is_random, lies_in, module_path
from rlplace.model.torch_adapter import pytree
from rlplace.runtime.strategy.cuts.follow import RefusedError, follow

_SAME_VALUE = {"view", "reshape", "_unsafe_view", "alias", "to", "contiguous", "clone", "dropout"}


@dataclass(frozen=True)
class Product:
    """A matrix product with a weight.

    Attributes:
        node: That makes it.
        module: Path of the module that it is the forward of.
        out_dim: Dimension of the weight that the output's last one comes from; the other is summed over.
        value: What it multiplies.
        source: The same before views, where no other op is between.
    """

    node: fx.Node
    module: str
    out_dim: int
    value: fx.Node
    source: fx.Node


@dataclass(frozen=True, eq=False)
class Region:
    """Products that share a cut.

    Attributes:
        source: What its first products read.
        columns: Products that start it.
        entry: Path of a module around all columns that is handed the source and uses it for them only; "" where there is none.
        rows: Products that end it.
        nodes: Nodes whose values are cut, and the dimension.
        sizes: Sizes of the cut dimensions on the way; the degree must divide all.
        packed: Parts that a column packs, by module path; others pack one.
        stored: Attributes (module path, name) that hold the size of a packed part, or a number of heads.
        local: Modules that read whole parameters beside what is cut, such as norms of heads: gradients are partial sums.
    """

    source: fx.Node
    columns: tuple[Product, ...]
    entry: str
    rows: list[Product] = field(default_factory=list)
    nodes: dict[fx.Node, int] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    packed: dict[str, int] = field(default_factory=dict)
    stored: set[tuple[str, str]] = field(default_factory=set)
    local: set[str] = field(default_factory=set)

    @property
    def draws(self) -> bool:
        """Whether numbers are drawn for what is cut."""
        return any(is_random(node) for node in self.nodes)


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """A block's graph, and what its products with weights are.

    Attributes:
        graph: From `export_training_graph`.
        parameters: Parameter path by ``get_attr`` node.
        products: Products with weights.
        live: Nodes that a gradient flows back through.
        behind: Paths of the parameters behind nodes that are computed from nothing else.
    """

    graph: fx.Graph
    parameters: Mapping[fx.Node, str]
    products: Mapping[fx.Node, Product]
    live: frozenset[fx.Node]
    behind: Mapping[fx.Node, frozenset[str]]


def block_graph(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockGraph:
    """Exports a block; `args` and `kwargs` are fake or meta, and say by ``requires_grad`` where gradients flow."""
    graph = export_training_graph(block, args, kwargs).module.graph
    tensors = dict(block.named_parameters(remove_duplicate=False))
    parameters = {node: str(node.target) for node in graph.nodes if node.op == "get_attr" and node.target in tensors}
    leaves = pytree.tree_leaves((args, kwargs))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    live = {n for n, leaf in zip(placeholders, leaves, strict=True) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    live |= {node for node, path in parameters.items() if tensors[path].requires_grad}
    for node in graph.nodes:
        if node not in live and any(value in live for value in node.all_input_nodes):
            live.add(node)
    products = {node: made for node in graph.nodes if (made := _product(node, parameters)) is not None}
    behind = {node: frozenset((path,)) for node, path in parameters.items()}
    for node in graph.nodes:
        if node.all_input_nodes and all(value in behind for value in node.all_input_nodes):
            behind[node] = frozenset().union(*(behind[value] for value in node.all_input_nodes))
    return BlockGraph(graph, parameters, products, frozenset(live), behind)


def _product(node: fx.Node, parameters: Mapping[fx.Node, str]) -> Product | None:
    name = getattr(node.target, "_opname", "")
    places = {"linear": (0, 1), "addmm": (1, 2), "mm": (0, 1), "matmul": (0, 1)}
    if node.op != "call_function" or name not in places:
        return None
    value, weight = (node.args[place] for place in places[name])
    out_dim = int(name != "linear")
    while isinstance(weight, fx.Node) and getattr(weight.target, "_opname", "") in ("t", "transpose", "numpy_T"):
        weight, out_dim = weight.args[0], 1 - out_dim
    if not isinstance(weight, fx.Node) or not parameters.get(weight, "").endswith(".weight") or not isinstance(value, fx.Node):
        return None
    source = value
    while getattr(source.target, "_opname", "") in _SAME_VALUE:
        source = source.args[0]  # type: ignore[assignment]
    return Product(node, parameters[weight].rpartition(".")[0], out_dim, value, source)


def regions(block: BlockGraph) -> tuple[list[Region], list[str]]:
    """Returns the regions of a block in the order of their sources, and why other products stay whole."""
    found: list[Region] = []
    reasons: list[str] = []
    for source in dict.fromkeys(product.source for product in block.products.values()):
        ended = [row for region in found for row in region.rows]
        columns = tuple(one for one in block.products.values() if one.source is source and one not in ended)
        try:
            found += [_region(block, source, columns)] if columns else []
        except RefusedError as error:
            reasons.append(f"{', '.join(product.module for product in columns)}: {error}")
    return found, reasons


def _region(block: BlockGraph, source: fx.Node, columns: tuple[Product, ...]) -> Region:
    region = Region(source, columns, _entry(block, source, columns))
    for product in columns:
        value = product.node.meta["val"]
        region.nodes[product.node] = value.dim() - 1
        region.sizes.add(value.shape[-1])
    for node in block.graph.nodes:
        if node in region.nodes or not any(value in region.nodes for value in node.all_input_nodes):
            continue
        if node.op == "output":
            raise RefusedError("what it makes leaves the block in parts")
        if node in block.products:
            product = block.products[node]
            if region.nodes.get(product.value) != product.value.meta["val"].dim() - 1:
                raise RefusedError(f"the product of {product.module} does not sum over the cut dimension")
            region.rows.append(product)
        elif (dim := follow(node, region, block)) is not None:
            region.nodes[node] = dim
    if not region.rows:
        raise RefusedError("no product sums over what it makes")
    for product in (*columns, *region.rows):
        _check_module(block, product)
    _check_local(block, region)
    return region


def _check_local(block: BlockGraph, region: Region) -> None:
    """Their parameters are read beside what is cut, and nowhere else."""
    for node, paths in block.behind.items():
        if any(path.rpartition(".")[0] in region.local for path in paths):
            for user in node.users:
                if user not in block.behind and user not in region.nodes:
                    raise RefusedError(f"{node.name} is read beside parts and by {user.name} beside whole values")


def _check_module(block: BlockGraph, product: Product) -> None:
    """Its module does nothing else, so that its forward may be replaced."""
    names = {getattr(node.target, "_opname", "") for node in block.graph.nodes if module_path(node) == product.module}
    if not names <= {"linear", "addmm", "mm", "matmul", "add", "t", "transpose", "numpy_T"} | _SAME_VALUE:
        raise RefusedError(f"{product.module} is more than a product with a weight")


def _entry(block: BlockGraph, source: fx.Node, columns: Sequence[Product]) -> str:
    """Returns the outermost module around all columns that is handed the source, and neither another activation nor another use
    of it.

    It is the outermost because code between two modules may read shapes of what the outer one is handed.
    """
    path = columns[0].module.split(".")
    outwards = (".".join(path[: depth + 1]) for depth in range(len(path)))
    around = (one for one in outwards if all(lies_in(product.module, one) for product in columns))
    return next((one for one in around if _reads_alone(block, source, columns, one)), "")


def _reads_alone(block: BlockGraph, source: fx.Node, columns: Sequence[Product], path: str) -> bool:
    if lies_in(module_path(source), path):
        return False
    readers, seen = [source], {source, *(product.node for product in columns)}
    while readers:
        for user in readers.pop().users:
            if user in seen or not lies_in(module_path(user), path):
                continue
            if getattr(user.target, "_opname", "") not in _SAME_VALUE:
                return False
            seen.add(user)
            readers.append(user)
    own = [node for node in block.graph.nodes if node.op != "get_attr" and lies_in(module_path(node), path)]
    handed = {value for node in own for value in node.all_input_nodes if value in block.live and value.op != "get_attr"}
    return all(value in seen or lies_in(module_path(value), path) for value in handed)


def common_parts(found: Iterable[Region]) -> int:
    """What the degree must divide; 0 without regions."""
    return math.gcd(*(size for region in found for size in region.sizes))


def check_draws(block: BlockGraph, regions: Sequence[Region]) -> None:
    """Every number is drawn for a part where it is drawn inside of a region, and nowhere else.

    Raises:
        RefusedError: Another is.
    """
    drawn = [node for node in block.graph.nodes if is_random(node)]
    number = {node: n for n, node in enumerate(block.graph.nodes)}
    spans = [(number[r.columns[0].node], number[r.rows[-1].node], r.nodes) for r in regions if r.draws]
    for node in drawn:
        if [node in nodes for first, last, nodes in spans] != [first < number[node] < last for first, last, _ in spans]:
            raise RefusedError(f"{node.name} draws numbers where parts and whole values are worked on by turns")
    if any(one[0] < other[0] < one[1] for one in spans for other in spans):
        raise RefusedError("regions that draw numbers lie in one another")
