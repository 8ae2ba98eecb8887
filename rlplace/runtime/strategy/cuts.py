"""Tensor-parallel layouts of a block, derived from its graph.

A *region* starts where matrix products with weights read one value: their weights are cut by output (``column``), so that what
they make is cut on its last dimension. The cut is followed through views (into heads), elementwise ops, attention and packed
splits to the products that sum over it, whose weights are cut by input (``row``) and whose partial sums end the region. What
runs along which dimension of an op follows from planning's rules (`rlplace.model.axes.access`); views keep the extent in memory
of a dimension that stays outermost of its parts. A region that a cut cannot pass stays whole, with the reason.

An adapter of low rank beside a product by output is a pair of products: the first stays whole, the second is cut by output.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from rlplace.model.aten import kind_of
from rlplace.model.axes.access import access_of
from rlplace.model.capture.export import export_training_graph, is_random, lies_in, module_path
from rlplace.model.torch_adapter import pytree

SEQUENCE = 1
"""Dimension of an activation that is split along the sequence."""

_PLACES = {"linear": (0, 1), "addmm": (1, 2), "mm": (0, 1), "matmul": (0, 1)}
"""Arguments of products that are the value and the weight."""

_TRANSPOSES = ("t", "transpose", "numpy_T")
_SAME_VALUE = {"view", "reshape", "_unsafe_view", "alias", "to", "contiguous", "clone", "dropout"}
_RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten"}
_VIEWS = {*_RESHAPES, "transpose", "permute", "t", "unsqueeze", "squeeze", "select", "slice", "expand"}


class RefusedError(Exception):
    """A cut that cannot pass an op."""


@dataclass(frozen=True)
class Product:
    """A matrix product with a weight."""

    node: fx.Node  # the op
    module: str  # path of the module that it is the forward of
    out_dim: int  # dimension of the weight that the output's last one comes from; the other is summed over
    value: fx.Node  # its activation
    source: fx.Node  # the activation before views, where no other op is between


@dataclass(frozen=True, eq=False)
class Region:
    """Products that share a cut."""

    source: fx.Node  # activation that its first products read, or the last of them where they read several
    columns: tuple[Product, ...]  # products that start it
    entries: tuple[str, ...]  # paths of modules around all columns that get the source and use it for them only, or none
    rows: list[Product] = field(default_factory=list)  # products that end it
    pairs: tuple[tuple[Product, Product], ...] = ()  # of adapters: one that stays whole, and the column that alone reads it
    nodes: dict[fx.Node, int] = field(default_factory=dict)  # nodes whose values are cut, and the dimension
    sizes: set[int] = field(default_factory=set)  # sizes of the cut dimensions on the way; the degree must divide all
    # columns of keys and values that groups of heads share, and how many heads these have: more processes repeat them
    shared: dict[str, int] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)  # modules whose attention shares them, which know how many heads do
    packed: dict[str, int] = field(default_factory=dict)  # parts that a column packs, by module path; others pack one
    # attributes (module path, name) that hold the size of a packed part, or a number of heads
    stored: set[tuple[str, str]] = field(default_factory=set)
    # modules that read whole parameters beside cut values, as norms of heads do: gradients are partial sums
    local: set[str] = field(default_factory=set)

    @property
    def products(self) -> tuple[Product, ...]:
        """Columns, those of pairs, then rows."""
        return *self.columns, *(second for _, second in self.pairs), *self.rows

    @property
    def draws(self) -> bool:
        """Presence of an op that draws random numbers."""
        return any(is_random(node) for node in self.nodes)

    @property
    def heads(self) -> int:
        """Heads of keys and values that may be held several times; 0 where there are none."""
        return math.gcd(*self.shared.values())


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """A block's graph and its products with weights."""

    graph: fx.Graph  # from `export_training_graph`
    products: Mapping[fx.Node, Product]  # products with weights
    live: frozenset[fx.Node]  # nodes that a gradient flows back through
    behind: Mapping[fx.Node, frozenset[str]]  # paths of the parameters behind nodes that are computed from nothing else


def block_graph(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockGraph:
    """Exports a block for fake or meta arguments, whose ``requires_grad`` says where gradients flow."""
    graph = export_training_graph(block, args, kwargs).module.graph
    tensors = dict(block.named_parameters(remove_duplicate=False))
    parameters = {node: str(node.target) for node in graph.nodes if node.op == "get_attr" and node.target in tensors}
    behind = {node: frozenset((path,)) for node, path in parameters.items()}
    leaves = pytree.tree_leaves((args, kwargs))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    live = {n for n, leaf in zip(placeholders, leaves, strict=True) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    live |= {node for node, path in parameters.items() if tensors[path].requires_grad}
    for node in graph.nodes:
        if any(value in live for value in node.all_input_nodes):
            live.add(node)
        if node.all_input_nodes and all(value in behind for value in node.all_input_nodes):
            behind[node] = frozenset().union(*(behind[value] for value in node.all_input_nodes))
    products = {node: made for node in graph.nodes if (made := _product(node, parameters)) is not None}
    return BlockGraph(graph, products, frozenset(live), behind)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", ""))


def _product(node: fx.Node, parameters: Mapping[fx.Node, str]) -> Product | None:
    name = _name(node)
    if node.op != "call_function" or name not in _PLACES:
        return None
    value, weight = (node.args[place] for place in _PLACES[name])
    out_dim = int(name != "linear")
    while isinstance(weight, fx.Node) and _name(weight) in _TRANSPOSES:
        weight, out_dim = weight.args[0], 1 - out_dim
    if not isinstance(weight, fx.Node) or not parameters.get(weight, "").endswith(".weight") or not isinstance(value, fx.Node):
        return None
    source = value
    while _name(source) in _SAME_VALUE:
        source = source.args[0]  # type: ignore[assignment]
    return Product(node, parameters[weight].rpartition(".")[0], out_dim, value, source)


def regions(block: BlockGraph) -> tuple[list[Region], list[str]]:
    """Returns the regions of a block in the order of their sources, and why other products stay whole.

    Products that cannot be cut alone are tried with those of each source before that could not either: queries read another
    activation than keys and values where a decoder attends to an encoder.
    """
    found: list[Region] = []
    alone: dict[tuple[Product, ...], str] = {}
    for source in dict.fromkeys(product.source for product in block.products.values()):
        ended = [product for region in found for product in region.products]
        columns = tuple(one for one in block.products.values() if one.source is source and one not in ended)
        pairs = tuple((one, second) for one in columns if (second := _alone_after(block, one)) is not None)
        tries = [((), ()), *([((), pairs)] if 0 < len(pairs) < len(columns) else ()), *((others, ()) for others in alone)]
        for others, adapters in tries if columns else ():
            try:
                found.append(_region(block, source, (*others, *columns), adapters))
                for cut in (others, columns):
                    alone.pop(cut, None)
                break
            except RefusedError as error:
                alone.setdefault(columns, str(error))
    return found, [f"{', '.join(product.module for product in columns)}: {reason}" for columns, reason in alone.items()]


def _alone_after(block: BlockGraph, product: Product) -> Product | None:
    """Returns the product that alone reads the result of another."""
    node = product.node
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node in block.products:
            return block.products[node] if block.products[node].source is product.node else None
        if _name(node) not in _SAME_VALUE:
            return None
    return None


def _region(
    block: BlockGraph, source: fx.Node, columns: tuple[Product, ...], pairs: tuple[tuple[Product, Product], ...] = ()
) -> Region:
    together, firsts = all(product.source is source for product in columns), [first for first, _ in pairs]
    entries = _entries(block, source, columns) if together else ()
    region = Region(source, tuple(one for one in columns if one not in firsts), entries, pairs=pairs)
    for product in region.products:
        region.nodes[product.node] = product.node.meta["val"].dim() - 1
    behind = {product.node: frozenset((product.module,)) for product in region.products}  # columns behind the nodes
    for node in block.graph.nodes:
        if node in region.nodes or not any(value in region.nodes for value in node.all_input_nodes):
            continue
        if node.op == "output":
            raise RefusedError("its results leave the block in parts")
        if node in block.products:
            product = block.products[node]
            if region.nodes.get(product.value) != product.value.meta["val"].dim() - 1:
                raise RefusedError(f"the product of {product.module} does not sum over the cut dimension")
            region.rows.append(product)
        elif (dim := _follow(node, region, block)) is not None:
            region.nodes[node] = dim
            behind[node] = frozenset().union(*(behind[value] for value in node.all_input_nodes if value in behind))
            if shared := _shared(node, region, behind):
                region.shared.update(shared)
                region.grouped.add(module_path(node))
    if not region.rows:
        raise RefusedError("no product sums over its results")
    if region.shared.keys() & {*region.packed, *(second.module for _, second in pairs)}:
        region.shared.clear()
    for node, dim in region.nodes.items():
        if isinstance(value := node.meta["val"], torch.Tensor) and not behind[node] <= region.shared.keys():
            region.sizes.add(value.shape[dim])
    for product in region.products:  # its module does nothing else, so that its forward may be replaced
        names = {_name(node) for node in block.graph.nodes if module_path(node) == product.module}
        if not names <= {*_PLACES, "add", *_TRANSPOSES, *_SAME_VALUE}:
            raise RefusedError(f"{product.module} is more than a product with a weight")
    for node, paths in block.behind.items():
        whole = [user for user in node.users if user not in block.behind and user not in region.nodes]
        if whole and any(path.rpartition(".")[0] in region.local for path in paths):
            raise RefusedError(f"{node.name} is read beside parts and by {whole[0].name} beside whole values")
    return region


def _entries(block: BlockGraph, source: fx.Node, columns: Sequence[Product]) -> tuple[str, ...]:
    """Returns the outermost modules around the columns that read the source for them alone, and no other activation.

    Code between two modules may read shapes of the arguments of the outer one, hence the outermost.
    """
    found: list[str] = []
    for column in columns:
        if any(lies_in(column.module, path) for path in found):
            continue
        names = column.module.split(".")
        for path in (".".join(names[: depth + 1]) for depth in range(len(names))):
            inside = [product for product in columns if lies_in(product.module, path)]
            if _reads_alone(block, source, inside, path):
                found.append(path)
                break
        else:
            return ()
    return tuple(found)


def _reads_alone(block: BlockGraph, source: fx.Node, columns: Sequence[Product], path: str) -> bool:
    if lies_in(module_path(source), path):
        return False
    readers, seen = [source], {source, *(product.node for product in columns)}
    while readers:
        for user in readers.pop().users:
            if user in seen:
                continue
            if _name(user) in _SAME_VALUE:
                seen.add(user)
                readers.append(user)
            elif lies_in(module_path(user), path):
                return False
    own = [node for node in block.graph.nodes if node.op != "get_attr" and lies_in(module_path(node), path)]
    read = {value for node in own for value in node.all_input_nodes if value in block.live and value.op != "get_attr"}
    return all(value in seen or lies_in(module_path(value), path) for value in read)


def common_parts(found: Iterable[Region]) -> int:
    """Returns the number that the degree must divide; 0 without regions."""
    return math.gcd(*(size for region in found for size in region.sizes))


def _shared(node: fx.Node, region: Region, behind: Mapping[fx.Node, frozenset[str]]) -> dict[str, int]:
    """Returns columns whose heads an op hands to groups of heads, with their number: keys and values of grouped attention."""
    name, found = _name(node), dict[str, int]()
    if name == "scaled_dot_product_attention":
        query, *shared = (value for value in node.args[:3] if isinstance(value, fx.Node))
        heads = query.meta["val"].shape[1]
    elif name == "expand":
        shared, heads = node.all_input_nodes[:1], 0
    else:
        return found
    for value in shared:
        dim = region.nodes.get(value)
        own = 0 if dim is None else value.meta["val"].shape[dim]
        grows = dim is not None and node.meta["val"].shape[dim + 1] > value.meta["val"].shape[dim + 1] == 1
        if dim is not None and (own < heads if heads else grows):
            found |= dict.fromkeys(behind[value], own)
    return found


def check_draws(block: BlockGraph, found: Sequence[Region]) -> None:
    """Checks that numbers drawn inside of a region are drawn for parts, and those outside for whole values.

    Raises:
        RefusedError: Some are not.
    """
    number = {node: n for n, node in enumerate(block.graph.nodes)}
    spans = [(number[r.columns[0].node], number[r.rows[-1].node], r.nodes) for r in found if r.draws]
    for node in filter(is_random, number):
        if [node in nodes for _, _, nodes in spans] != [first < number[node] < last for first, last, _ in spans]:
            raise RefusedError(f"{node.name} draws numbers where parts and whole values are worked on by turns")
    if any(one[0] < other[0] < one[1] for one in spans for other in spans):
        raise RefusedError("regions that draw numbers lie in one another")


def _follow(node: fx.Node, region: Region, block: BlockGraph) -> int | None:
    """Returns the cut dimension of a node's value; None where it is no tensor.

    Raises:
        RefusedError: The op mixes values of different parts, or its gradient would be a partial sum.
    """
    name, value = _name(node), node.meta.get("val")
    if node.target is operator.getitem:
        return region.nodes[node.args[0]]  # type: ignore[index]
    if name in ("split", "split_with_sizes", "chunk"):
        return _packed(node, region, block)
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, (tuple, list)) and node.op == "call_function":
            return None
        raise RefusedError(f"nothing is known of {node.name}")
    place = passed(node, region.nodes, partial(_partial_sum, region, block))
    if name in _VIEWS:
        shape: Any = node.args[1] if name in _RESHAPES and len(node.args) > 1 else ()
        if isinstance(shape, (list, tuple)) and -1 in shape and shape.index(-1) != place:
            region.stored.add((module_path(node), "num_heads"))  # a whole number of heads would be made up for elsewhere
    return place


def _partial_sum(region: Region, block: BlockGraph, value: fx.Node) -> bool:
    """Returns whether the gradient of a whole value beside parts is a partial sum, and not one of a `Region.local` module."""
    owners = {path.rpartition(".")[0] for path in block.behind.get(value, ())}
    if len(owners) == 1 and "" not in owners and owners <= {module_path(user) for user in value.users}:
        region.local.update(owners)
        return False
    return value in block.live


def passed(node: fx.Node, cut: Mapping[fx.Node, int], partial_sum: Callable[[fx.Node], bool] = lambda value: False) -> int:
    """Returns the dimension of an op's result that its cut inputs are cut on.

    Args:
        node: Reads at least one of them, and makes one tensor.
        cut: Values to cut dimension.
        partial_sum: Whether a whole input must not be read beside parts, because its gradient would be a partial sum.

    Raises:
        RefusedError: The op mixes parts, or is not known.
    """
    name = _name(node) or node.name
    if name in _VIEWS:
        return _viewed(node, cut)
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
            if partial_sum(value):
                raise RefusedError(f"the gradient of {value.name} would be a partial sum")
    for n, size, step in runs[node]:
        if n == dim_name:
            return _place(made[node], size * step, node)
    raise RefusedError(f"{name} works along the cut dimension")


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _place(value: torch.Tensor, extent: int, node: fx.Node) -> int:
    """Returns the dimension whose parts are that many neighbours in memory."""
    sizes = zip(value.shape, value.stride(), strict=True)
    found = [n for n, (size, step) in enumerate(sizes) if size > 1 and size * step == extent]
    if len(found) != 1:
        raise RefusedError(f"{node.name} takes the cut dimension apart")
    return found[0]


def _viewed(node: fx.Node, cut: Mapping[fx.Node, int]) -> int:
    source: Any = node.args[0]
    before, after = source.meta["val"], node.meta["val"]
    if _name(node) in _RESHAPES:
        before, after = _contiguous(before), _contiguous(after)
    return _place(after, before.shape[cut[source]] * before.stride(cut[source]), node)


def _packed(node: fx.Node, region: Region, block: BlockGraph) -> int:
    """Follows a split of the cut dimension: the weight packs several, and each is cut by itself."""
    source: Any = node.args[0]
    dim = region.nodes[source]
    place: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if place % source.meta["val"].dim() != dim:
        return dim
    sizes = {part.shape[dim] for part in node.meta["val"]}
    while source not in block.products and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if len(sizes) > 1 or source not in block.products:
        raise RefusedError(f"{node.name} splits the cut dimension into unlike parts")
    region.packed[block.products[source].module] = len(node.meta["val"])
    if _name(node) == "split":
        region.stored.add((module_path(node), "split_size"))
    return dim


def sequence_modules(block: nn.Module, graph: BlockGraph, found: Sequence[Region]) -> tuple[str, ...]:
    """Returns modules whose parameters are read by positions: their gradients are summed over the parts of the sequence.

    Raises:
        RefusedError: Activations between the regions cannot be split along the sequence: an op mixes positions, or parts would
            differ in what they draw.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder" and node in graph.live]
    if len(inputs) != 1 or inputs[0].meta["val"].dim() != 3:
        raise RefusedError("it does not read one activation of samples x positions x width")
    inside = {node for region in found for node in (*region.nodes, *(first.node for first, _ in region.pairs))}
    rows = {product.module for region in found for product in region.rows}
    columns = {product.module for region in found for product in region.products} - rows
    if any(not region.entries for region in found):
        raise RefusedError("no module takes in what several products read")
    split, modules = {inputs[0]: SEQUENCE}, set[str]()
    for node in graph.graph.nodes:
        path, read = module_path(node), node.all_input_nodes
        if path in rows and any(value in inside or value in split for value in read):
            split[node] = SEQUENCE
        elif node in inside or path in columns or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        elif any(value in split for value in read):
            name = _name(node) or node.name
            views = kind_of(name) == "view" and name != "alias"
            if node in graph.products or views or passed(node, split) != SEQUENCE:
                raise RefusedError(f"{name} may mix positions")
            split[node] = SEQUENCE
            modules |= {parameter.rpartition(".")[0] for value in read for parameter in graph.behind.get(value, ())}
    if any(is_random(node) for node in graph.graph.nodes if node not in split and node not in inside):
        raise RefusedError("it draws numbers for a whole value")
    unsplit = [product.module for node, product in graph.products.items() if node not in inside and product.module not in rows]
    if unsplit:
        raise RefusedError(f"{', '.join(unsplit)} has no layout")
    if any(not path or any(True for _ in block.get_submodule(path).children()) for path in modules):
        raise RefusedError("a module with modules of its own reads parameters by positions")
    return tuple(sorted(modules))
