"""A segment as a module that a process can run: its nodes as a graph of their own."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rlplace.runtime import aliases
from rlplace.runtime.distributed.graph.assign import units
from rlplace.runtime.distributed.graph.cut import Cut, Segment
from rlplace.runtime.distributed.graph.pieces import Piece, convex_pieces
from rlplace.runtime.distributed.graph.recomputed import Recomputed
from rlplace.runtime.held import rewrite_devices


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
