"""Tensor-parallel layouts of a whole model: its blocks' regions, its vocabulary, and why others stay whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from rlplace.errors import InputError
from rlplace.model.capture.export import is_random, module_path
from rlplace.model.capture.fake import fake_copy, fake_inputs, new_fake_mode
from rlplace.model.torch_adapter import pytree
from rlplace.plan.strategy import Pipeline, Stage
from rlplace.runtime.strategy.capture import UnitGraph
from rlplace.runtime.strategy.cuts import (
    SEQUENCE,
    BlockGraph,
    RefusedError,
    Region,
    block_graph,
    check_draws,
    common_parts,
    regions,
    sequence_modules,
)
from rlplace.runtime.strategy.fact_records import TensorFacts
from rlplace.runtime.strategy.mesh import MeshPlace
from rlplace.runtime.strategy.tensor import LayoutTrial, TensorParallel

_VIEWS = ("view", "reshape")

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Layout of a block."""

    regions: Sequence[Region]  # in the order of the block
    reasons: Sequence[str]  # why products stay whole
    # modules that work by positions, where activations between regions may be split along the sequence
    positions: tuple[str, ...] = ()
    draws: bool = False  # whether it draws random numbers
    no_sequence: str | None = None  # why activations stay whole


@dataclass(frozen=True, eq=False)
class ModelLayouts(TensorFacts):
    """Layouts of a model."""

    blocks: Mapping[str, BlockLayout] = field(default_factory=dict)  # by path, for blocks with regions


def find_layouts(units: Mapping[str, nn.Module], calls: Mapping[str, Call]) -> ModelLayouts:
    """Finds the layouts of a model.

    Args:
        units: Its blocks by path.
        calls: Arguments of the first call of each (`blocks.observe`).
    """
    known: dict[Any, BlockLayout] = {}
    blocks: dict[str, BlockLayout] = {}
    layouts: dict[str, str] = {}
    reasons: list[str] = []
    readers = _readers(units)
    for path, module in units.items():
        if path not in calls or not any(True for _ in module.children()):
            continue
        if any(len(readers[parameter]) > 1 for parameter in module.parameters()):
            reasons.append(f"block {path}: it shares a parameter with another module")
            continue
        key = (_settings(module), tuple(_kind(leaf) for leaf in pytree.tree_leaves(calls[path])))
        if key not in known:
            try:
                known[key] = _block_layout(module, calls[path])
            except RefusedError as error:
                known[key] = BlockLayout((), [str(error)])
        layout = known[key]
        reasons += [f"block {path}: {reason}" for reason in layout.reasons]
        if layout.regions:
            blocks[path] = layout
        for region in layout.regions:
            layouts |= {f"{path}.{p.module}": "row" if p in region.rows else "column" for p in region.products}
            layouts |= {f"{path}.{name}": "local" for name in region.local}
    every = [region for layout in blocks.values() for region in layout.regions]
    parts, heads = common_parts(every), tuple(sorted({region.heads for region in every} - {0}))
    no_tensor = None if blocks else next(iter(reasons), "no block has two products in a row")
    sequence = next((f"block {path}: {b.no_sequence}" for path, b in blocks.items() if b.no_sequence), None)
    positions = 0 if sequence or not blocks else _activation(calls[next(iter(blocks))]).shape[1]
    return ModelLayouts(no_tensor, parts, heads, sequence, layouts, _vocabulary(units, readers), positions, blocks)


def _settings(block: nn.Module) -> Any:
    """Returns a value that is equal for blocks that do the same, whatever number they have."""
    plain = [
        (
            type(module),
            *(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, (bool, int, float, str)) and not name.endswith(("idx", "index", "layer_id"))
            ),
        )
        for module in block.modules()
    ]
    return tuple(plain), tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else type(leaf)


def _readers(units: Mapping[str, nn.Module]) -> Mapping[nn.Parameter, set[int]]:
    """Returns the modules that hold each parameter."""
    readers: dict[nn.Parameter, set[int]] = defaultdict(set)
    for module in {id(module): module for unit in units.values() for module in unit.modules()}.values():
        for parameter in module.parameters(recurse=False):
            readers[parameter].add(id(module))
    return readers


def _vocabulary(units: Mapping[str, nn.Module], readers: Mapping[nn.Parameter, set[int]]) -> tuple[str, ...]:
    """Returns embeddings and products of one width, but none whose parameter another kind of module reads, too."""
    tables = {path: unit for path, unit in units.items() if type(unit) is nn.Embedding and unit.max_norm is None}
    heads = {path: unit for path, unit in units.items() if type(unit) is nn.Linear}
    sizes = {len(unit.weight) for unit in tables.values()} & {len(unit.weight) for unit in heads.values()}
    found = {path: unit for path, unit in {**tables, **heads}.items() if len(unit.get_parameter("weight")) in sizes}
    inside = {id(unit) for unit in found.values()}
    return tuple(path for path, unit in found.items() if readers[unit.get_parameter("weight")] <= inside)


def _block_layout(block: nn.Module, call: Call) -> BlockLayout:
    mode = new_fake_mode()
    copied = fake_copy(block, mode).train()  # it may be evaluated now and trained later, with dropout
    args, kwargs = fake_inputs(call, mode)
    for value in _activations((args, kwargs))[:1]:  # blocks behind frozen ones are laid out as trained ones are
        value.requires_grad_()
    try:
        graph = block_graph(copied, args, kwargs)
    except Exception as error:  # the block's own code runs
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        raise RefusedError(f"its forward cannot be exported ({type(error).__name__}: {reason})") from error
    found, reasons = regions(graph)
    check_draws(graph, found)
    if not found:
        return BlockLayout((), reasons)
    parts, heads = common_parts(found), math.lcm(*(region.heads for region in found if region.heads))
    degrees = [n for n in range(2, parts + 1) if parts % n == 0 and (heads % n == 0 or n % heads == 0)]
    if not degrees:
        raise RefusedError("its heads and widths have no divisor in common")
    degree = degrees[0]
    draws = any(is_random(node) for node in graph.graph.nodes)
    whole = BlockLayout(found, reasons, (), draws)
    _try(block, call, graph, whole, degree, sequence=False)
    try:
        for repeating in [n for n in degrees if n > heads][:1]:
            _try(block, call, graph, whole, repeating, sequence=False)
    except RefusedError:  # its code is for whole heads: the degree has to divide them
        for region in found:
            region.sizes.update(region.shared.values())
            region.shared.clear()
    try:
        layout = BlockLayout(found, reasons, sequence_modules(block, graph, found), draws)
        if _activation(call).shape[1] % degree == 0:
            _try(block, call, graph, layout, degree, sequence=True)
    except RefusedError as error:
        return BlockLayout(found, reasons, (), draws, str(error))
    return layout


def _activation(call: Call) -> torch.Tensor:
    """Returns the argument of a block that a gradient flows back through, or would if parameters before it were trained."""
    return _activations(call)[0]


def _activations(call: Call) -> list[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return [leaf for leaf in leaves if leaf.requires_grad] or [leaf for leaf in leaves if leaf.dim() == 3] or leaves


class _Views(TorchFunctionMode):
    """The shapes of the views that code asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _VIEWS:
            self.shapes.append(list(made.shape))
        return made


def _try(block: nn.Module, call: Call, graph: BlockGraph, layout: BlockLayout, degree: int, *, sequence: bool) -> None:
    """Runs a block on the shapes that one process has.

    Raises:
        RefusedError: It does not run, or makes what is no part.
    """
    mode = new_fake_mode()
    copied, whole = fake_copy(block, mode), fake_copy(block, mode)
    args, kwargs = fake_inputs(call, mode)
    try:
        with mode, torch.enable_grad():
            trial = LayoutTrial(degree, sequence)
            trial.regions(copied, layout.regions, layout.positions)
            if sequence:
                trial.split(copied, _activation(call).shape[-1])
            wanted = pytree.tree_leaves(whole(*args, **kwargs))[0]
            with _Views() as views:
                made = pytree.tree_leaves(copied(*args, **kwargs))[0]
        shape = _part_of(wanted.shape, SEQUENCE if sequence else None, degree)
    except Exception as error:  # the block's own code runs
        reason = (str(error).splitlines() or [""])[0][:120]
        raise RefusedError(f"its code does not run on parts ({type(error).__name__}: {reason})") from error
    if list(made.shape) != shape:
        raise RefusedError(f"on parts it makes {list(made.shape)}, not {shape}")
    _check_views(graph, layout.regions, views.shapes, degree)


def _check_views(graph: BlockGraph, found: Sequence[Region], shapes: Sequence[list[int]], degree: int) -> None:
    """Checks that views of cut values have the shapes of parts: a ``-1`` hides a number of heads that is not divided."""
    replaced = {product.module for region in found for product in region.products}
    views = [node for node in graph.graph.nodes if getattr(node.target, "_opname", "") in _VIEWS]
    views = [node for node in views if module_path(node) not in replaced]
    if len(shapes) < len(views):  # a head for every process: nothing is repeated
        views = [node for node in views if getattr(getattr(node.args[0], "target", None), "_opname", "") != "expand"]
    cut = {node: dim for region in found for node, dim in region.nodes.items()}
    wanted = [_part_of(node.meta["val"].shape, cut.get(node), degree) for node in views]
    if len(shapes) != len(views) or any(node in cut and a != b for node, a, b in zip(views, shapes, wanted, strict=True)):
        raise RefusedError("on parts its views have other shapes than a part has")


def _part_of(shape: Sequence[int], cut: int | None, degree: int) -> list[int]:
    return [max(1, size // degree) if dim == cut else size for dim, size in enumerate(shape)]


def lay_out(
    place: MeshPlace,
    stage: Stage,
    found: ModelLayouts,
    units: Mapping[str, nn.Module],
    captured: UnitGraph | None,
    *,
    across: bool = False,
) -> None:
    """Puts the layouts of some units in place, none without a tensor group.

    The captured forward matters for sequence parallelism alone.

    Args:
        place: Coordinates of this process.
        stage: The stage of the strategy.
        found: The layouts.
        units: The units of the stage.
        captured: The forward of the whole model.
        across: Whether activations cross between stages in parts (`stay_parts`).
    """
    degree = stage.axis("tensor")
    if degree == 1:
        return
    layouts = TensorParallel(place.mesh["tensor"], stage.sequence_parallel, place.device)
    # A plan's words may leave a vocabulary whole; names of one table are laid out together.
    tables = [path for path in found.vocabulary if path in units and (not stage.tensor or path in stage.tensor)]
    cut = {units[path].get_parameter("weight") for path in tables}
    for path, module in units.items():
        if path in found.blocks:
            layout = found.blocks[path]
            layouts.regions(module, layout.regions, layout.positions)
            layouts.streams(module, layout.regions, layout.draws)
        elif path in found.vocabulary and module.get_parameter("weight") in cut:
            if len(module.get_parameter("weight")) % degree == 0:
                layouts.vocabulary(module)
    if not stage.sequence_parallel or captured is None:
        return
    # Activations are split where a run of blocks begins, and joined where it ends.
    after = {
        node: read
        for node, (_, read) in _runs(captured, found.blocks if across else found.blocks.keys() & units.keys()).items()
    }
    for node, read in after.items():
        if node.target in units and node not in after.values():
            layouts.split(units[str(node.target)], _activation(captured.calls[str(node.target)]).shape[-1])
        if node.target in units and read is None:
            layouts.join(units[str(node.target)])


def stay_parts(captured: UnitGraph, pipeline: Pipeline, found: ModelLayouts) -> bool:
    """Gives activations that cross between stages in parts the shapes of parts; returns whether there are any.

    Raises:
        InputError: The degree does not divide the positions.
    """
    degrees = {(stage.axis("tensor"), stage.sequence_parallel) for stage in pipeline.stages}
    degree, along_sequence = next(iter(degrees))
    if len(degrees) > 1 or not along_sequence:
        return False
    for value in (value for value, read in _runs(captured, found.blocks).values() if read is not None):
        whole = value.meta["val"]
        if whole.shape[SEQUENCE] % degree:
            raise InputError(f"native: {whole.shape[SEQUENCE]} positions cannot be split over {degree} processes; pad them")
        value.meta["val"] = torch.empty(_part_of(whole.shape, SEQUENCE, degree), dtype=whole.dtype, device="meta")
    return True


def _runs(captured: UnitGraph, blocks: Collection[str]) -> dict[fx.Node, tuple[fx.Node, fx.Node | None]]:
    """Returns the activation of each block, and the one block that reads it; None where another op reads it, too."""
    inside = [node for node in captured.graph.nodes if node.op == "call_module" and node.target in blocks]
    found: dict[fx.Node, tuple[fx.Node, fx.Node | None]] = {}
    for node in inside:
        value, readers = node, list(node.users)
        if len(readers) == 1 and readers[0].op == "call_function" and readers[0].args == (node, 0):
            value, readers = readers[0], list(readers[0].users)
        found[node] = value, readers[0] if len(readers) == 1 and readers[0] in inside else None
    return found
