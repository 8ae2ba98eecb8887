"""Replaces in-place ops by their out-of-place variants, where nobody can tell the difference.

``relu_(conv(x))`` becomes ``relu(conv(x))``. A cut between an op and an in-place op on its result would make the next process
write to a tensor that autograd saved in the first one. An op stays as it is when it writes to a parameter, a buffer or an
input, or when another view of the same memory is read later: those have to share a device.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import fx

from rlplace.runtime import aliases

_KEPT = {"set_", "resize_", "copy_", "detach_", "requires_grad_", "fill_", "zero_"}
"""Without an out-of-place variant that autograd can differentiate."""


def replace_in_place_ops(graph: fx.Graph, ops: MutableMapping[str, str]) -> None:
    """Rewrites a graph in place.

    Args:
        graph: Exported training IR with tensor attributes as placeholders.
        ops: Op name by node name; a new node takes the entry of the one that it replaces.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    memory = aliases.shared_memory(graph.nodes)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        members.setdefault(memory.find(node), []).append(node)
    for node in list(graph.nodes):
        variant = _out_of_place(node)
        if variant is None:
            continue
        target = node.args[0]
        family = members[memory.find(node)]
        if any(other.op == "placeholder" for other in family):
            continue
        here = position[node]
        earlier = [other for other in family if position[other] < here and other is not target]
        if any(position[user] > here for other in earlier for user in other.users):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(variant, node.args, node.kwargs)
        new.meta = dict(node.meta)
        position[new] = here
        node.replace_all_uses_with(new)
        target.replace_all_uses_with(
            new, delete_user_cb=lambda user, here=here, new=new: position[user] > here and user is not new
        )
        family[family.index(node)] = new
        memory.union(node, new)
        if node.name in ops:
            ops[new.name] = ops.pop(node.name)
        graph.erase_node(node)


def _out_of_place(node: fx.Node) -> torch._ops.OpOverload | None:
    """The op that does the same to a new tensor; None when there is none or it would make another dtype or shape."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return None
    name = op._schema.name.partition("::")[2]
    if not name.endswith("_") or name.endswith("__") or name in _KEPT or not isinstance(node.args[0], fx.Node):
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    variant = None if packet is None else getattr(packet, op._overloadname, None)
    value = node.meta.get("val")
    if variant is None or not isinstance(value, torch.Tensor):
        return None
    operands = [_dtype(other) for other in node.all_input_nodes]
    # With one floating-point dtype among the operands nothing is promoted.
    same = {dtype for dtype in operands if dtype is not None} == {value.dtype}
    return variant if same and _shape(node.args[0]) == tuple(value.shape) else None


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
