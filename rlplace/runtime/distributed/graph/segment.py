"""A segment as a module that a process can run: its nodes as a graph of their own.

Convex pieces of a graph: what of it can run as one function.

A set of nodes is convex when no path leaves it and comes back: only then can it be one call. A set that is not is taken apart
into as few convex pieces as a simple rule finds: nodes are layered by how often the way to them changes its set, what is of one
set and layer is a piece, and pieces of one set are joined, lower layers first, as long as no cycle comes of it.

Activation checkpointing: a piece of a segment that keeps its inputs only and runs again before its backward.

torch.utils.checkpoint does the work. What it cannot know of an exported graph is added here:

* Random ops draw the masks of the first run again: their key is entered again, see `randomness`.
* Parameters and buffers that the forward writes to, such as running statistics and counters, are written once. The second run
  works on copies of what they held when the first one began, so it also reads what the first one read.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from rlplace.runtime import aliases
from rlplace.runtime.distributed.graph.acyclic import join_acyclic, topological
from rlplace.runtime.distributed.graph.assign import Assignment, units
from rlplace.runtime.distributed.graph.cut import Cut, Segment
from rlplace.runtime.distributed.graph.randomness import current_key, random_key
from rlplace.runtime.held import rewrite_devices


def recompute_sets(segments: Iterable[Iterable[int]] | None, assignment: Assignment) -> dict[str, int]:
    """Number of the plan's recompute segment by node name, for every node of a group that is in one."""
    set_of_group = {int(group): number for number, groups in enumerate(segments or ()) for group in groups}
    return {name: set_of_group[group] for name, group in assignment.group.items() if group in set_of_group}


class Recomputed(nn.Module):
    """Runs a graph; under grad it keeps the inputs, drops everything inside and runs the graph again in the backward."""

    def __init__(self, code: fx.GraphModule, changing: Sequence[int]) -> None:
        """Wraps a graph.

        Args:
            code: The graph.
            changing: Positions of inputs that somebody writes to in a step.
        """
        super().__init__()
        self.code = code
        self.changing = tuple(changing)

    def forward(self, *values: Any) -> Any:
        """Runs the graph."""
        if not torch.is_grad_enabled():
            return self.code(*values)
        key = current_key()
        written = {position: values[position] for position in self.changing}
        before = {position: value.detach().clone() for position, value in written.items()}
        kept = [None if position in written else value for position, value in enumerate(values)]
        runs = 0

        def run(*kept: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 1:
                return self.code(*(written.get(position, value) for position, value in enumerate(kept)))
            copies = {position: value.clone() for position, value in before.items()}
            with random_key(*key) if key is not None else contextlib.nullcontext():
                return self.code(*(copies.get(position, value) for position, value in enumerate(kept)))

        return checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=key is None)


def segment_module(
    cut: Cut, segment: Segment, device: torch.device, recompute: Mapping[str, int] | None = None
) -> fx.GraphModule:
    """The code of a segment.

    Args:
        cut: The cut.
        segment: One of its segments.
        device: Where it will run; devices that export wrote into arguments become this one.
        recompute: Set of a node that is to run again before its backward, by node name, see `recomputed.recompute_sets`. The
            nodes of a set become one sub-module, or several where the set is not convex within the segment.

    Returns:
        Called with the tensors of ``segment.held``, the values of ``segment.inputs`` and those of ``segment.reads``; returns
        the values of ``segment.makes`` as a tuple.
    """
    source = cut.graph.module
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    modules: dict[str, Any] = {}
    names = {held: node for node, held in cut.graph.held_of_node.items()}
    outside = [
        *(names[name] for name in segment.held),
        *(cut.graph.inputs[number] for number in segment.inputs),
        *segment.reads,
    ]
    for name in outside:
        original = cut.graph.node(name)
        copied[original] = graph.placeholder(name)
        copied[original].meta = dict(original.meta)
    for piece in _pieces(cut, segment, recompute or {}):
        if piece.label is None:
            _copy(piece.nodes, graph, copied, source, modules)
        else:
            _call_recomputed(cut, segment, piece, graph, copied, modules, device)
    graph.output(tuple(copied[cut.graph.node(name)] for name in segment.makes))
    return _module(graph, modules, device)


def _pieces(cut: Cut, segment: Segment, recompute: Mapping[str, int]) -> list[Piece]:
    nodes = [cut.graph.node(name) for name in segment.nodes]
    label = {node: recompute[node.name] for node in nodes if node.name in recompute}
    if not label:
        return [Piece(None, tuple(nodes))]
    pieces = convex_pieces(nodes, units(nodes), label)
    # What no gradient flows through keeps nothing that could be freed.
    return [
        piece if any(n.name in cut.graph.layout and cut.graph.layout[n.name].requires_grad for n in piece.nodes) else
        Piece(None, piece.nodes)
        for piece in pieces
    ]  # fmt: skip


def _copy(
    nodes: Sequence[fx.Node], graph: fx.Graph, copied: dict[fx.Node, fx.Node], source: fx.GraphModule, modules: dict[str, Any]
) -> None:
    for original in nodes:
        for other in original.all_input_nodes:
            if other.op == "get_attr" and other not in copied:  # a sub-graph, of which every graph has its own node
                modules[str(other.target)] = aliases.get_attr(source, str(other.target))
                copied[other] = graph.node_copy(other)
        copied[original] = graph.node_copy(original, copied.__getitem__)


def _call_recomputed(
    cut: Cut,
    segment: Segment,
    piece: Piece,
    graph: fx.Graph,
    copied: dict[fx.Node, fx.Node],
    modules: dict[str, Any],
    device: torch.device,
) -> None:
    """Adds a call of a piece to a graph."""
    members = set(piece.nodes)
    taken = dict.fromkeys(o for n in piece.nodes for o in n.all_input_nodes if o not in members and o.op != "get_attr")
    returned = [n for n in piece.nodes if n.name in segment.makes or any(user not in members for user in n.users)]
    inner, inside = fx.Graph(), {}
    for node in taken:
        inside[node] = inner.placeholder(node.name)
        inside[node].meta = dict(node.meta)
    own: dict[str, Any] = {}
    _copy(piece.nodes, inner, inside, cut.graph.module, own)
    inner.output(tuple(inside[node] for node in returned))
    held = cut.graph.held_of_node
    changing = [position for position, node in enumerate(taken) if held.get(node.name) in cut.graph.writes]
    name = f"recomputed_{len(modules)}"
    modules[name] = Recomputed(_module(inner, own, device), changing)
    result = graph.call_module(name, tuple(copied[node] for node in taken))
    for position, node in enumerate(returned):
        copied[node] = graph.call_function(operator.getitem, (result, position))
        copied[node].meta = dict(node.meta)


def _module(graph: fx.Graph, modules: dict[str, Any], device: torch.device) -> fx.GraphModule:
    module = fx.GraphModule(modules, graph)
    for node in graph.nodes:
        rewrite_devices(node, device)
    graph.lint()
    module.recompile()
    return module


@dataclass(frozen=True, eq=False)
class Piece:
    """Nodes that run one after the other.

    Attributes:
        label: Number of their set; None: of none.
        nodes: In execution order.
    """

    label: int | None
    nodes: tuple[fx.Node, ...]


def convex_pieces(nodes: Sequence[fx.Node], unit: Mapping[fx.Node, int], label: Mapping[fx.Node, int]) -> list[Piece]:
    """Takes a graph apart into convex pieces of sets.

    Args:
        nodes: In execution order.
        unit: Number of each node; nodes with one number stay together, and contracting them leaves the graph acyclic.
        label: Set of a node; nodes of one unit have the same, nodes of no set none. Those make a piece for every unit.

    Returns:
        The pieces in an order in which they can run, close to that of `nodes`.
    """
    inputs: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    label_of: dict[int, int | None] = {}
    for position, node in enumerate(nodes):
        number = unit[node]
        first.setdefault(number, position)
        label_of.setdefault(number, label.get(node))
        inputs.setdefault(number, set()).update(unit[other] for other in node.all_input_nodes if other in unit)
    level: dict[int, int] = {}
    for number in topological(inputs, first):
        before = [level[other] + (label_of[other] != label_of[number]) for other in inputs[number] if other != number]
        level[number] = max(before, default=0)
    # A class is named by one of its units.
    of_set: dict[tuple[int, int], int] = {}
    member = {
        number: number if label_of[number] is None else of_set.setdefault((label_of[number], level[number]), number)  # type: ignore[arg-type]
        for number in inputs
    }
    edges: dict[int, set[int]] = {number: set() for number in set(member.values())}
    for number, before_it in inputs.items():
        for other in before_it:
            if member[other] != member[number]:
                edges[member[other]].add(member[number])
    into = join_acyclic(edges, {index: key[0] for key, index in sorted(of_set.items(), key=lambda item: item[0][::-1])})
    member = {number: into.get(index, index) for number, index in member.items()}
    between: dict[int, set[int]] = {index: set() for index in edges}
    start: dict[int, int] = {}
    inside: dict[int, list[fx.Node]] = {}
    for number, before_it in inputs.items():
        between[member[number]].update(member[other] for other in before_it)
        start[member[number]] = min(start.get(member[number], len(nodes)), first[number])
    for node in nodes:
        inside.setdefault(member[unit[node]], []).append(node)
    return [Piece(label_of[index], tuple(inside[index])) for index in topological(between, start)]
