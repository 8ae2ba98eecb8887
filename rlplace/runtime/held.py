"""Exported graphs whose parameters, buffers and constants come in as arguments."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from rlplace.runtime import aliases


def hold_attributes(
    source: fx.GraphModule, graph: fx.Graph, copied: dict[fx.Node, fx.Node], first_name: Mapping[str, str]
) -> dict[str, fx.Node]:
    """Turns tensor attributes into placeholders, one per tensor; they come before the user inputs.

    Args:
        source: The exported module.
        graph: The new graph, still empty.
        copied: Filled with the placeholder of every attribute node of `source`.
        first_name: First name of each parameter and buffer by any of its names, so that ties have one holder.

    Returns:
        The placeholders by first name.
    """
    held: dict[str, fx.Node] = {}
    for node in source.graph.nodes:
        if node.op != "get_attr" or isinstance(aliases.get_attr(source, str(node.target)), fx.GraphModule):
            continue
        name = first_name.get(str(node.target), str(node.target))
        if name not in held:
            held[name] = graph.placeholder(node.name)
            held[name].meta = dict(node.meta)
        copied[node] = held[name]
    return held


def is_check(node: fx.Node) -> bool:
    """Nodes that only assert what export saw: the devices they name are not the ones used here."""
    return (node.op == "call_module" and str(node.target) == "_guards_fn") or (
        node.op == "call_function" and "_assert_tensor_metadata" in str(node.target)
    )


def rewrite_devices(node: fx.Node, device: torch.device) -> None:
    """Replaces the devices that export wrote into the arguments, sub-graphs included."""
    if node.op != "call_function":
        return
    if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
        node.args = tuple(device if isinstance(value, torch.device) else value for value in node.args)
        node.kwargs = {key: device if isinstance(value, torch.device) else value for key, value in node.kwargs.items()}
    for module in aliases.sub_graphs(node):
        for inner in list(module.graph.nodes):
            if is_check(inner):
                module.graph.erase_node(inner)
            else:
                rewrite_devices(inner, device)
        module.recompile()
