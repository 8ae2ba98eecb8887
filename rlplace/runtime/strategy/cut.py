"""The cut of a captured forward into stages, each a module of the model's own modules.

Values without a parameter behind them (masks, positions, rotary tables) are computed again on every stage that reads them,
from the inputs, which every stage gets. All other values that later stages read are sent from stage to stage; where processes
divide the positions of samples, of a part of them once a block with attention has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from rlplace.errors import InputError, show
from rlplace.model.capture.export import is_random, rewrite_devices
from rlplace.model.torch_adapter import pytree
from rlplace.runtime.base.batches import SEEN
from rlplace.runtime.strategy.blocks import owner
from rlplace.runtime.strategy.capture import UnitGraph, written_buffer
from rlplace.runtime.strategy.why_not_divided import uneven

FLOATING = -1
"""Stage of values that every stage computes for itself."""


@dataclass(frozen=True, eq=False)
class StageGraph:
    """One stage of a cut."""

    graph: fx.Graph  # takes `taken`, then `inputs`; returns the tensors for the next stage, or the last one's flat outputs
    # values of the stage before: shapes, dtypes and whether a gradient flows back, on the meta device
    taken: tuple[torch.Tensor, ...]
    given: tuple[torch.Tensor, ...]  # values for the next stage, likewise; empty for the last one
    inputs: tuple[int, ...]  # positions of the flat inputs that it reads
    parameters: frozenset[str]  # names of the parameters that it reads, ties under every name
    positions: int = 0  # of the whole sequence, of which it takes a part of the values of the stage before; 0: all of them


class Divided(NamedTuple):
    """A division of the positions of samples among processes.

    Attributes:
        attending: By path of the blocks with attention, the position of the activation among their flat arguments.
        degree: Number of parts.
    """

    attending: Mapping[str, int]
    degree: int


def cut(captured: UnitGraph, blocks: Sequence[Sequence[str]], divided: Divided | None = None) -> list[StageGraph]:
    """Cuts between stages.

    Args:
        captured: The forward.
        blocks: Per stage the paths of its blocks; what lies inside a block goes with it.
        divided: How stages divide positions; None: they run on whole sequences.

    Raises:
        InputError: A unit is in no stage, an earlier stage reads what a later one makes, or one stage writes what others read;
            or a value of parts has its positions at a strange place.
    """
    stage_of_block = {block: number for number, names in enumerate(blocks) for block in names}
    nodes = list(captured.graph.nodes)
    stage_of = _stages(captured, stage_of_block)
    stage_of[nodes[-1]] = len(blocks) - 1
    read_until: dict[fx.Node, int] = {}
    for node in nodes:
        for value in node.all_input_nodes:
            read_until[value] = max(read_until.get(value, FLOATING), stage_of[node])
    crossing = [
        [node for node in nodes if FLOATING < stage_of[node] <= edge < read_until.get(node, FLOATING)]
        for edge in range(-1, len(blocks))
    ]
    for node in (node for edge in crossing for node in edge):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise InputError(f"native: the value {node.name} crosses from stage to stage and is no tensor; cut elsewhere")
    written = {buffer: stage_of[node] for node in nodes if (buffer := written_buffer(node)) is not None}
    trained, stages = _trained(captured), []
    first, sizes, made = (len(blocks), (0, 0), set[fx.Node]()) if divided is None else _parts(nodes, stage_of, divided)
    parts = {node: _part_shape(node, *sizes, divided.degree) for edge in crossing for node in edge if divided and node in made}
    for number, (taken, given) in enumerate(pairwise(crossing)):
        own = [node for node in nodes if stage_of[node] == number]
        needed = needed_for([*own, *given], set(taken))
        for buffer, stage in written.items():
            if buffer in needed and stage != number:
                raise InputError(
                    f"native: buffer {show(buffer.target)} is written in stage {stage} and read in {number}; cut elsewhere"
                )
        graph, inputs = stage_graph(nodes, taken, given, needed)
        stages.append(
            StageGraph(
                graph,
                _signature(taken, trained, parts),
                _signature(given, trained, parts),
                inputs,
                _names(captured, graph),
                sizes[1] if number > first else 0,
            )
        )
    return stages


def _parts(
    nodes: Sequence[fx.Node], stage_of: Mapping[fx.Node, int], divided: Divided
) -> tuple[int, tuple[int, int], set[fx.Node]]:
    """Returns the first stage with attention, samples and positions of its activation, and all that is made from parts."""
    attending = [node for node in nodes if node.op == "call_module" and node.target in divided.attending]
    first, made = min(stage_of[node] for node in attending), set[fx.Node]()
    for number, node in enumerate(nodes):
        begun = stage_of[node] > first or (stage_of[node] == first and number >= nodes.index(attending[0]))
        if (node.op == "call_module" and begun) or any(before in made for before in node.all_input_nodes):
            made.add(node)
    leaves = pytree.tree_leaves((attending[0].args, attending[0].kwargs))
    samples, positions = leaves[divided.attending[str(attending[0].target)]].meta["val"].shape[:2]
    if positions % (2 * divided.degree):
        raise InputError(f"native: {uneven(positions, divided.degree)}")
    return first, (samples, positions), made


def _part_shape(node: fx.Node, samples: int, positions: int, degree: int) -> tuple[int, ...]:
    """Returns the shape of a value that is made from parts: its positions come second, or first, with the samples or alone."""
    shape = tuple(node.meta["val"].shape)
    along = 1 if shape[1:2] == (positions,) else 0
    if shape and (shape[along] == positions or shape[0] == samples * positions):
        return *shape[:along], shape[along] // degree, *shape[along + 1 :]
    if positions in shape:
        raise InputError(
            f"native: {node.name}, of shape {shape}, crosses from stage to stage and has its {positions} positions neither "
            "first nor second; cut elsewhere, or plan with context=1"
        )
    return shape


def _stages(captured: UnitGraph, stage_of_block: Mapping[str, int]) -> dict[fx.Node, int]:
    """Returns the stage of every node, `FLOATING` for what has no parameter behind it."""
    stage_of: dict[fx.Node, int] = {}
    parameters = [node for node in captured.graph.nodes if _is_parameter(captured, node)]
    for node in captured.graph.nodes:
        before = max((stage_of[value] for value in node.all_input_nodes), default=FLOATING)
        stage_of[node] = before
        if node.op == "call_module":
            stage_of[node] = _stage_of_unit(captured, str(node.target), before, stage_of_block)
        elif is_random(node) or written_buffer(node) or any(value in parameters for value in node.all_input_nodes):
            stage_of[node] = max(before, 0)
    for node in parameters:
        stages = {stage_of[user] for user in node.users}
        if owner(str(node.target), captured.units) is not None or len(stages) > 1:
            raise InputError(
                f"native: parameter {show(node.target)} is read outside of the block that holds it, or by several stages; name "
                "a larger module as block, or run without a pipeline"
            )
        stage_of[node] = stages.pop()
    return stage_of


def _stage_of_unit(captured: UnitGraph, path: str, before: int, stage_of_block: Mapping[str, int]) -> int:
    block = owner(path, stage_of_block)
    if block is None and not any(True for _ in captured.units[path].parameters()):
        return max(before, 0)
    if block is None:
        raise InputError(f"native: no stage names the block {show(path)}; add it to one")
    if before > stage_of_block[block]:
        raise InputError(
            f"native: block {show(path)} of stage {stage_of_block[block]} reads what stage {before} makes; "
            "stages follow the model's order"
        )
    return stage_of_block[block]


def _is_parameter(captured: UnitGraph, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(attrgetter(str(node.target))(captured.module), nn.Parameter)


def _trained(captured: UnitGraph) -> set[fx.Node]:
    """Returns nodes that a gradient flows back through: floating-point values with a trainable parameter behind them."""
    trained: set[fx.Node] = set()
    for node in captured.graph.nodes:
        own = node.op == "call_module" and any(p.requires_grad for p in captured.units[node.target].parameters())
        held = node.op == "get_attr" and getattr(attrgetter(node.target)(captured.module), "requires_grad", False)
        value = node.meta.get("val")
        whole = not isinstance(value, torch.Tensor) or value.is_floating_point()
        detached = getattr(node.target, "_opname", "") == "detach"
        if (own or held or any(before in trained for before in node.all_input_nodes)) and whole and not detached:
            trained.add(node)
    return trained


def stage_graph(
    nodes: Sequence[fx.Node], taken: Sequence[fx.Node], given: Sequence[fx.Node], needed: set[fx.Node]
) -> tuple[fx.Graph, tuple[int, ...]]:
    """Returns a graph of some nodes, and the positions of the flat inputs that it reads."""
    placeholders = [node for node in nodes if node.op == "placeholder"]
    read = [node for node in placeholders if node in needed and node not in taken]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*taken, *read):
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda value: copies[value])
    if nodes[-1] not in needed:
        graph.output(tuple(graph.call_method("contiguous", (copies[node],)) for node in given))
    return graph, tuple(placeholders.index(node) for node in read)


def _names(captured: UnitGraph, graph: fx.Graph) -> frozenset[str]:
    """Returns names of the parameters that a stage reads."""
    called = {str(node.target): captured.units[str(node.target)] for node in graph.nodes if node.op == "call_module"}
    names = {f"{path}.{name}" for path, unit in called.items() for name, _ in unit.named_parameters(remove_duplicate=False)}
    return frozenset(names | {str(node.target) for node in graph.nodes if _is_parameter(captured, node)})


def needed_for(wanted: Sequence[fx.Node], taken: set[fx.Node]) -> set[fx.Node]:
    """Returns everything behind some nodes, up to the values of the stage before."""
    needed, open_nodes = set(taken), list(wanted)
    while open_nodes:
        node = open_nodes.pop()
        if node not in needed:
            needed.add(node)
            open_nodes.extend(node.all_input_nodes)
    return needed


def _signature(
    nodes: Sequence[fx.Node], trained: set[fx.Node], parts: Mapping[fx.Node, tuple[int, ...]]
) -> tuple[torch.Tensor, ...]:
    values = ((parts.get(node, node.meta["val"].shape), node.meta["val"].dtype, node in trained) for node in nodes)
    return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape, dtype, grad in values)


def stage_module(captured: UnitGraph, stage: StageGraph, device: torch.device) -> fx.GraphModule:
    """Returns a stage as a module for a device, with the model's own modules under their names; none is moved there."""
    made = fx.GraphModule(captured.module, stage.graph)
    for node in made.graph.nodes:
        rewrite_devices(node, device)
        node.target = SEEN.get(node.target, node.target)
    made.recompile()
    saved = set(captured.model.state_dict())
    for node in stage.graph.nodes:
        value = attrgetter(node.target)(made) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and node.target not in saved:
            place, _, name = node.target.rpartition(".")
            made.get_submodule(place)._non_persistent_buffers_set.add(name)
    return made


class WholeRecord(nn.Module):
    """A recorded forward in one piece, which is called as the model is; copies of it have modules of their own."""

    def __init__(self, captured: UnitGraph) -> None:
        super().__init__()
        nodes, spec = list(captured.graph.nodes), captured.out_spec
        graph, self._inputs = stage_graph(nodes, (), (), needed_for([nodes[-1]], set()))
        device = next((p.device for p in captured.model.parameters() if not p.is_meta), torch.device("cpu"))
        self.body = stage_module(captured, StageGraph(graph, (), (), self._inputs, frozenset()), device)
        self._output = lambda flat: pytree.tree_unflatten(flat, spec)  # functions are not copied, whose specs warn

    def forward(self, **inputs: Any) -> Any:
        """Runs it."""
        leaves = pytree.tree_leaves(((), inputs))
        return self._output(self.body(*(leaves[at] for at in self._inputs)))

    def units(self) -> dict[str, nn.Module]:
        """Returns the units that it calls, by path."""
        called = [str(node.target) for node in self.body.graph.nodes if node.op == "call_module"]
        return {path: self.body.get_submodule(path) for path in called}


def same_held(again: UnitGraph, first: UnitGraph, device: torch.device) -> None:
    """Gives a second record of a forward the modules and buffers of the first, which have values and torch's wrappers.

    Raises:
        InputError: It reads a parameter between blocks, which torch's wrappers replace.
    """
    for path, module in first.units.items():
        again.module.add_submodule(path, module)
    for node in again.graph.nodes:
        if node.op != "get_attr":
            continue
        if _is_parameter(again, node):
            raise InputError(
                f"native: parameter {show(node.target)} is read between blocks, so a pipeline runs one shape and one mode; pad "
                "to one shape, or name a larger module as block"
            )
        place, _, name = str(node.target).rpartition(".")
        try:
            value = attrgetter(str(node.target))(first.module)
        except AttributeError:  # a constant of this record
            value = attrgetter(str(node.target))(again.module)
        if isinstance(value, torch.Tensor):
            setattr(again.module.get_submodule(place), name, value.to(device))
