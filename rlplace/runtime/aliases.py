"""Which nodes of an exported graph share memory, and which write to it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rlplace.problem.order import UnionFind

_RUNNING_STATS_WRITERS = {"aten::batch_norm", "aten::instance_norm"}
"""Ops that write to running_mean and running_var, arguments 3 and 4, without saying so in their schema."""

_IDENTITY_IN_EVAL = {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"}


def shared_memory(nodes: Iterable[fx.Node]) -> UnionFind:
    """Sets of nodes that may share memory."""
    memory = UnionFind()
    for node in nodes:
        for other in shared_with(node):
            memory.union(other, node)
    return memory


def without_writes(graph: fx.Graph) -> None:
    """What writes to what another op made makes a new value: ``x.add_(y)`` is ``x.add(y)`` where nothing shares memory."""
    earlier: set[fx.Node] = set()
    for node in list(graph.nodes):
        value = next(written_by(node), None)
        name = getattr(node.target, "_opname", "")
        plain = getattr(getattr(torch.ops.aten, name[:-1], None), getattr(node.target, "_overloadname", ""), None)
        if value is not None and name.endswith("_") and plain is not None and isinstance(value.target, torch._ops.OpOverload):
            memory = shared_memory(earlier)
            alone = all(other is value or memory.find(other) != memory.find(value) for other in earlier)
            if alone and {_dtype(other) for other in node.all_input_nodes} == {_dtype(value)}:
                node.target = plain
                value.replace_all_uses_with(node, lambda user: user is not node and user not in earlier)  # noqa: B023
        earlier.add(node)


def shared_with(node: fx.Node) -> Iterator[fx.Node]:
    """Inputs that an output of the node may share memory with."""
    if node.op != "call_function":
        return
    if node.target is operator.getitem:
        yield node.args[0]  # type: ignore[misc]
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a sub-graph: what it returns may be what it was given
        yield from sub_graph_writes(node)
        return
    if schema.name in _IDENTITY_IN_EVAL and node.args[2:] == (False,):
        yield from _nodes(node.args[0])
    if not any(result.alias_info is not None for result in schema.returns):
        return
    for argument, value in arguments(node):
        if argument.alias_info is not None:
            # A cast makes a new tensor although the schema allows for the same one.
            yield from (other for other in _nodes(value) if argument.alias_info.is_write or _dtype(other) == _dtype(node))


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """Inputs whose values the node changes."""
    if node.op != "call_function" or node.target is operator.getitem:
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        yield from sub_graph_writes(node)
        return
    for position, (argument, value) in enumerate(arguments(node)):
        implicit = schema.name in _RUNNING_STATS_WRITERS and position in (3, 4)
        if implicit or (argument.alias_info is not None and argument.alias_info.is_write):
            yield from _nodes(value)


def sub_graphs(node: fx.Node) -> list[fx.GraphModule]:
    """Graph modules that a higher-order node calls."""
    modules = []
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            value = get_attr(node.graph.owning_module, str(argument.target))
            if isinstance(value, fx.GraphModule):
                modules.append(value)
    return modules


def sub_graph_writes(node: fx.Node) -> list[fx.Node]:
    """Tensor inputs of a higher-order node, when its sub-graph writes to one of its own inputs; else nothing."""
    for module in sub_graphs(node):
        memory = shared_memory(module.graph.nodes)
        changed = {memory.find(other) for inner in module.graph.nodes for other in written_by(inner)}
        if any(memory.find(inner) in changed for inner in module.graph.nodes if inner.op == "placeholder"):
            return [argument for argument in node.all_input_nodes if _dtype(argument) is not None]
    return []


def get_attr(module: Any, target: str) -> Any:
    """The attribute at a dotted path."""
    return operator.attrgetter(target)(module)


def arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """The arguments of a node's op with their values, defaults filled in."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        given = position < len(node.args)
        yield argument, node.args[position] if given else node.kwargs.get(argument.name, argument.default_value)


def _nodes(value: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]


def _dtype(node: fx.Node) -> Any:
    """The dtype of a node's value; None: it is not one tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
