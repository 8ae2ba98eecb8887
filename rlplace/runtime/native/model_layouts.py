"""Tensor-parallel layouts of a whole model: its blocks' regions, its vocabulary, and why others stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rlplace.graph.export import module_path
from rlplace.graph.fake import fake_copy, fake_inputs, new_fake_mode
from rlplace.plan.strategy import Stage
from rlplace.runtime.native.capture import Captured
from rlplace.runtime.native.follow import RefusedError, draws
from rlplace.runtime.native.layouts import BlockGraph, Region, block_graph, common_parts, regions
from rlplace.runtime.native.mesh import Place
from rlplace.runtime.native.sequence import sequence_modules
from rlplace.runtime.native.streams import check_draws
from rlplace.runtime.native.tensor import Layouts, Trial

_VIEWS = ("view", "reshape")

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Layout of a block.

    Attributes:
        regions: In the order of the block.
        positions: Modules that work by positions, where activations between regions may be split along the sequence.
        width: Last dimension of the activation that the block is handed.
        reasons: Why products stay whole.
        draws: Whether it draws random numbers.
        no_sequence: Why activations stay whole.
    """

    regions: tuple[Region, ...]
    positions: tuple[str, ...] = ()
    width: int = 0
    draws: bool = False
    reasons: tuple[str, ...] = ()
    no_sequence: str | None = None


@dataclass(frozen=True, eq=False)
class ModelLayouts:
    """Layouts of a model.

    Attributes:
        blocks: By path, for blocks with regions.
        vocabulary: Paths of embeddings and of the products that make logits of the same width.
        parts: The degree must divide it; 0 where nothing has a layout.
        length: Positions of the activations that blocks are handed; 0 where they cannot be split.
        no_tensor: Why nothing has one, None where something has.
        no_sequence: Why activations cannot be split along the sequence, None where they can.
    """

    blocks: Mapping[str, BlockLayout]
    vocabulary: tuple[str, ...]
    parts: int
    length: int
    no_tensor: str | None
    no_sequence: str | None

    def by_module(self) -> dict[str, str]:
        """``column`` or ``row`` by module path, for every product with a layout."""
        named: dict[str, str] = {}
        for path, block in self.blocks.items():
            for region in block.regions:
                for layout, products in (("column", region.columns), ("row", region.rows)):
                    named |= {f"{path}.{product.module}": layout for product in products}
        return named


def find_layouts(units: Mapping[str, nn.Module], calls: Mapping[str, Call]) -> ModelLayouts:
    """Finds the layouts of a model.

    Args:
        units: Its blocks by path.
        calls: What each is called with (`capture.observe`).
    """
    known: dict[Any, BlockLayout] = {}
    blocks: dict[str, BlockLayout] = {}
    reasons: list[str] = []
    readers = _readers(units)
    for path, module in units.items():
        if path not in calls or not any(True for _ in module.children()):
            continue
        key = (_settings(module), tuple(_kind(leaf) for leaf in pytree.tree_leaves(calls[path])))
        if key not in known:
            known[key] = _block_layout(module, calls[path])
        layout = known[key]
        if any(len(readers[parameter]) > 1 for parameter in module.parameters()):
            layout = BlockLayout((), reasons=("it shares a parameter with another module",))
        if layout.regions:
            blocks[path] = layout
        reasons += [f"block {path}: {reason}" for reason in layout.reasons]
    parts = gcd(*(common_parts(layout.regions) for layout in blocks.values()))
    no_tensor = None if blocks else next(iter(reasons), "no block has two products in a row")
    sequence = next((f"block {path}: {b.no_sequence}" for path, b in blocks.items() if b.no_sequence), None)
    length = 0 if sequence or not blocks else _activation(calls[next(iter(blocks))]).shape[1]
    return ModelLayouts(blocks, _vocabulary(units), parts, length, no_tensor, sequence)


def _settings(block: nn.Module) -> Any:
    """Equal for blocks that do the same, whatever number they have."""
    plain = [
        (type(module), *((name, value) for name, value in vars(module).items() if _sets(name, value)))
        for module in block.modules()
    ]
    return tuple(plain), tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _sets(name: str, value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) and not name.endswith(("idx", "index", "layer_id"))


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else type(leaf)


def _vocabulary(units: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Embeddings and products of one width; none whose parameter another kind of module reads, too."""
    tables = {path: unit for path, unit in units.items() if type(unit) is nn.Embedding and unit.max_norm is None}
    heads = {path: unit for path, unit in units.items() if type(unit) is nn.Linear}
    sizes = {unit.num_embeddings for unit in tables.values()} & {unit.out_features for unit in heads.values()}
    found: dict[str, nn.Module] = {path: unit for path, unit in tables.items() if unit.num_embeddings in sizes}
    found |= {path: unit for path, unit in heads.items() if unit.out_features in sizes}
    readers, inside = _readers(units), {id(unit) for unit in found.values()}
    return tuple(path for path, unit in found.items() if readers[unit.get_parameter("weight")] <= inside)


def _readers(units: Mapping[str, nn.Module]) -> dict[nn.Parameter, set[int]]:
    """The modules that hold each parameter."""
    readers: dict[nn.Parameter, set[int]] = {}
    for module in {id(module): module for unit in units.values() for module in unit.modules()}.values():
        for parameter in module.parameters(recurse=False):
            readers.setdefault(parameter, set()).add(id(module))
    return readers


def _block_layout(block: nn.Module, call: Call) -> BlockLayout:
    mode = new_fake_mode()
    copied = fake_copy(block, mode).train()  # it may be evaluated now and trained later, with dropout
    args, kwargs = fake_inputs(call, mode)
    try:
        graph = block_graph(copied, args, kwargs)
    except Exception as error:  # the block's own code runs
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        return BlockLayout((), reasons=(f"its forward cannot be exported ({type(error).__name__}: {reason})",))
    found, reasons = regions(graph)
    try:
        check_draws(graph, found)
    except RefusedError as error:
        return BlockLayout((), reasons=(str(error),))
    drawn = any(draws(node) for node in graph.graph.nodes)
    if not found:
        return BlockLayout((), reasons=tuple(reasons))
    degree = next((n for n in range(2, common_parts(found) + 1) if common_parts(found) % n == 0), None)
    if degree is None:
        return BlockLayout((), reasons=("its heads and widths have no divisor in common",))
    if (failed := _trial(block, call, graph, found, (), degree, sequence=False)) is not None:
        return BlockLayout((), reasons=(failed,))
    try:
        positions = sequence_modules(block, graph, found)
    except RefusedError as error:
        return BlockLayout(tuple(found), (), 0, drawn, tuple(reasons), str(error))
    hidden = _activation(call)
    fits = hidden.shape[1] % degree == 0
    problem = _trial(block, call, graph, found, positions, degree, sequence=True) if fits else None
    return BlockLayout(tuple(found), positions, hidden.shape[-1], drawn, tuple(reasons), problem)


def _activation(call: Call) -> torch.Tensor:
    """What a gradient flows back through, of what a block is handed."""
    leaves = pytree.tree_leaves(call)
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)


class _Views(TorchFunctionMode):
    """Notes the shapes of views whose code says them."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _VIEWS:
            self.shapes.append(list(made.shape))
        return made


def _same_views(graph: BlockGraph, found: Sequence[Region], shapes: Sequence[list[int]], degree: int) -> bool:
    """Whether views of what is cut have the shapes that parts have: a ``-1`` hides a number of heads that is not divided."""
    replaced = {product.module for region in found for product in (*region.columns, *region.rows)}
    views = [node for node in graph.graph.nodes if getattr(node.target, "_opname", "") in _VIEWS]
    views = [node for node in views if module_path(node) not in replaced]
    cut = {node: dim for region in found for node, dim in region.nodes.items()}
    if len(shapes) != len(views):
        return False
    for node, shape in zip(views, shapes, strict=True):
        whole = list(node.meta["val"].shape)
        if node in cut and shape != [size // degree if dim == cut[node] else size for dim, size in enumerate(whole)]:
            return False
    return True


def _trial(
    block: nn.Module,
    call: Call,
    graph: BlockGraph,
    found: Sequence[Region],
    positions: Sequence[str],
    degree: int,
    *,
    sequence: bool,
) -> str | None:
    """Runs a block on the shapes that one process has; says what goes wrong."""
    mode = new_fake_mode()
    copied, whole = fake_copy(block, mode), fake_copy(block, mode)
    args, kwargs = fake_inputs(call, mode)
    try:
        with mode, torch.enable_grad():
            layouts = Trial(degree, sequence)
            layouts.regions(copied, found, positions)
            if sequence:
                layouts.split(copied, _activation(call).shape[-1])
            wanted = pytree.tree_leaves(whole(*args, **kwargs))[0]
            with _Views() as views:
                made = pytree.tree_leaves(copied(*args, **kwargs))[0]
        shape = [size // degree if sequence and dim == 1 else size for dim, size in enumerate(wanted.shape)]
    except Exception as error:  # the block's own code runs
        return f"its code does not run on parts ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]})"
    if list(made.shape) != shape:
        return f"on parts it makes {list(made.shape)}, not {shape}"
    return None if _same_views(graph, found, views.shapes, degree) else "on parts its views have other shapes than a part has"


def lay_out(place: Place, stage: Stage, found: ModelLayouts, units: Mapping[str, nn.Module], captured: Captured | None) -> None:
    """Puts the layouts of some units in place; what was captured is looked at for sequence parallelism alone."""
    degree = stage.axis("tensor")
    layouts = Layouts(place.mesh["tensor"], stage.sequence_parallel, place.device)
    for path, module in units.items():
        if path in found.blocks:
            layouts.regions(module, found.blocks[path].regions, found.blocks[path].positions)
            layouts.streams(module, found.blocks[path].regions, found.blocks[path].draws)
        elif path in found.vocabulary and isinstance(module, nn.Embedding) and module.num_embeddings % degree == 0:
            layouts.embedding(module)
        elif path in found.vocabulary and isinstance(module, nn.Linear) and module.out_features % degree == 0:
            layouts.head(module)
    if not stage.sequence_parallel or captured is None:
        return
    # Activations are split where a run of blocks begins, and joined where it ends.
    inside = [node for node in captured.graph.nodes if node.op == "call_module" and node.target in units]
    inside = [node for node in inside if node.target in found.blocks]
    after = {node: _handed_on(node, inside) for node in inside}
    for node in inside:
        if node not in after.values():
            layouts.split(units[node.target], found.blocks[node.target].width)
        if after[node] is None:
            layouts.join(units[node.target])


def _handed_on(node: fx.Node, inside: Sequence[fx.Node]) -> fx.Node | None:
    """The one block that reads what a block makes, None where another op reads it too."""
    readers = list(node.users)
    if len(readers) == 1 and readers[0].op == "call_function" and readers[0].args == (node, 0):
        readers = list(readers[0].users)
    return readers[0] if len(readers) == 1 and readers[0] in inside else None
