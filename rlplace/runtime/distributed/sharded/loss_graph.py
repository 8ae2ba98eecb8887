"""A loss function outside the model as ops of the graph, so that it runs on pieces, too."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from rlplace.graph.export import export_training_graph
from rlplace.graph.fake import new_fake_mode
from rlplace.plan.device_map import LOSS_OP
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph

LOSS_PREFIX = f"{LOSS_OP}/"
"""Prefix of the names of the ops inside; the last one has the name of the loss itself."""


class _Loss(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *values: Any) -> Any:
        return self.call(*values)


def open_loss(graph: ForwardGraph) -> ForwardGraph:
    """The same forward with the loss function's own ops instead of its node; unchanged where that does not work.

    Args:
        graph: It is not touched.
    """
    name = graph.loss
    if name is None or graph.op_of_node.get(name) != LOSS_OP or isinstance(graph.node(name).target, torch._ops.OpOverload):
        return graph
    inner = _traced(graph, graph.node(name))
    if inner is None:
        return graph
    module = fx.GraphModule(graph.module, graph.module.graph)
    new = fx.Graph()
    new.set_codegen(fx.graph.CodeGen())
    copied: dict[fx.Node, Any] = {}
    inside: dict[str, str] = {}
    for node in graph.module.graph.nodes:
        if node.name != name:
            copied[node] = new.node_copy(node, copied.__getitem__)
            continue
        arguments = [copied[a] if isinstance(a, fx.Node) else a for a in node.args]
        within: dict[fx.Node, Any] = dict(zip((n for n in inner.graph.nodes if n.op == "placeholder"), arguments, strict=True))
        for op in inner.graph.nodes:
            if op.op == "get_attr":
                setattr(module, f"_loss_{op.name}", getattr(inner, str(op.target)))
                within[op] = new.get_attr(f"_loss_{op.name}")
            elif op.op == "call_function":
                within[op] = new.node_copy(op, within.__getitem__)
                inside[within[op].name] = LOSS_PREFIX + op.name
            elif op.op == "output":
                copied[node] = within[op.args[0][0]]
    module.graph = new
    new.lint()
    loss = copied[graph.node(name)]
    names = {n: op for n, op in graph.op_of_node.items() if n != name} | inside | {loss.name: LOSS_OP}
    layout = {**graph.layout, loss.name: graph.layout[name]}
    outputs = tuple(loss.name if item == name else item for item in graph.outputs)
    return replace(graph, module=module, op_of_node=names, layout=layout, loss=loss.name, outputs=outputs)


def _traced(graph: ForwardGraph, node: fx.Node) -> fx.GraphModule | None:
    """The loss function's ops, from its arguments in order; None when it cannot be exported, or reads what is outside."""
    mode = new_fake_mode()
    with mode:
        values = []
        for argument in node.args:
            layout = graph.layout.get(argument.name) if isinstance(argument, fx.Node) else None
            if isinstance(argument, fx.Node) and layout is None:
                return None
            if layout is None:
                values.append(argument)
            else:
                fake = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
                values.append(fake.requires_grad_(layout.requires_grad))
    try:
        with torch.enable_grad(), warnings.catch_warnings(), torch.autocast("cpu", enabled=False):
            warnings.simplefilter("ignore")
            traced = export_training_graph(_Loss(node.target), tuple(values)).module
    except Exception:  # export runs the caller's function, which may do anything
        return None
    nodes = list(traced.graph.nodes)
    other = any(n.op not in ("placeholder", "output", "get_attr", "call_function") for n in nodes)
    held = any(n.op == "get_attr" and not isinstance(getattr(traced, str(n.target)), fx.GraphModule) for n in nodes)
    result = next(n for n in nodes if n.op == "output").args[0][0]
    complete = sum(n.op == "placeholder" for n in nodes) == len(node.args) and isinstance(result, fx.Node)
    return traced if complete and not other and not held and result.op == "call_function" else None
