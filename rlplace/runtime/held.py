"""What exported graphs and copies of models hold: names of tied tensors, models without values, devices written into graphs."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx, nn


def tensors_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their first names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def first_names(model: nn.Module) -> dict[str, str]:
    """First name of every parameter and buffer by any of its names, so that tied tensors have one."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names[name] = first.setdefault(id(tensor), name)
    return names


def meta_copy(model: nn.Module) -> nn.Module:
    """The module without its values: what is traced when inputs of another shape come."""
    memo: dict[int, Any] = {}
    for tensor in tensors_in(model).values():
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


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
    for module in _sub_graphs(node):
        for inner in list(module.graph.nodes):
            if is_check(inner):
                module.graph.erase_node(inner)
            else:
                rewrite_devices(inner, device)
        module.recompile()


def _sub_graphs(node: fx.Node) -> list[fx.GraphModule]:
    """Graph modules that a higher-order node calls."""
    modules = []
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            value = get_attr(node.graph.owning_module, str(argument.target))
            if isinstance(value, fx.GraphModule):
                modules.append(value)
    return modules


def get_attr(module: Any, target: str) -> Any:
    """The attribute at a dotted path."""
    return operator.attrgetter(target)(module)
