"""A segment as a module that a process can run: its nodes as a graph of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rlplace.runtime.distributed.cut import Cut, Segment
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
    names = dict(zip(cut.graph.held, (n.name for n in source.graph.nodes if n.op == "placeholder"), strict=False))
    outside = [
        *(names[name] for name in segment.held),
        *(cut.graph.inputs[number] for number in segment.inputs),
        *segment.reads,
    ]
    for name in outside:
        original = cut.graph.node(name)
        copied[original] = graph.placeholder(name)
        copied[original].meta = dict(original.meta)

    def mapped(node: fx.Node) -> fx.Node:
        if node not in copied and node.op == "get_attr":  # a sub-graph, of which every segment has its own
            copied[node] = graph.node_copy(node)
        return copied[node]

    for name in segment.nodes:
        original = cut.graph.node(name)
        for other in original.all_input_nodes:
            mapped(other)
        copied[original] = graph.node_copy(original, mapped)
    graph.output(tuple(copied[cut.graph.node(name)] for name in segment.makes))
    module = fx.GraphModule(source, graph)
    for node in graph.nodes:
        rewrite_devices(node, device)
    graph.lint()
    module.recompile()
    return module


def call(module: fx.GraphModule, values: list[Any]) -> tuple[Any, ...]:
    """Runs a segment's code."""
    result: tuple[Any, ...] = module(*values)
    return result
