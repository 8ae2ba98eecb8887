"""A segment as a module that a process can run: its nodes as a graph of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rlplace.runtime import aliases
from rlplace.runtime.distributed.graph.cut import Cut, Segment
from rlplace.runtime.held import rewrite_devices


def segment_module(cut: Cut, segment: Segment, device: torch.device) -> fx.GraphModule:
    """The code of a segment.

    Args:
        cut: The cut.
        segment: One of its segments.
        device: Where it will run; devices that export wrote into arguments become this one.

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
    _copy([cut.graph.node(name) for name in segment.nodes], graph, copied, source, modules)
    graph.output(tuple(copied[cut.graph.node(name)] for name in segment.makes))
    return _module(graph, modules, device)


def _copy(
    nodes: Sequence[fx.Node], graph: fx.Graph, copied: dict[fx.Node, fx.Node], source: fx.GraphModule, modules: dict[str, Any]
) -> None:
    for original in nodes:
        for other in original.all_input_nodes:
            if other.op == "get_attr" and other not in copied:  # a sub-graph, of which every graph has its own node
                modules[str(other.target)] = aliases.get_attr(source, str(other.target))
                copied[other] = graph.node_copy(other)
        copied[original] = graph.node_copy(original, copied.__getitem__)


def _module(graph: fx.Graph, modules: dict[str, Any], device: torch.device) -> fx.GraphModule:
    module = fx.GraphModule(modules, graph)
    for node in graph.nodes:
        rewrite_devices(node, device)
    graph.lint()
    module.recompile()
    return module
