"""The tensors of a model that one process holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.utils import _sync_params_and_buffers

from rlplace.runtime.distributed.ranks import group_of
from rlplace.runtime.held import first_names

_BUCKET_BYTES = 1 << 28


@dataclass(frozen=True, eq=False)
class Own:
    """What one process holds of a model.

    Attributes:
        parameters: By first name.
        buffers: By first name, constants of the graph among them.
        owners: Devices of the plan that hold a tensor, by first name of every parameter and buffer of the model, ascending.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    owners: Mapping[str, tuple[int, ...]]

    def holding(self, constants: Mapping[str, torch.Tensor], device: torch.device) -> Own:
        """The same with the constants of a graph, on the process's device."""
        return dataclasses.replace(
            self, buffers={**self.buffers, **{name: value.detach().to(device) for name, value in constants.items()}}
        )


def own_tensors(
    model: nn.Module,
    owners: Mapping[str, tuple[int, ...]],
    constants: Mapping[str, torch.Tensor],
    rank: int,
    device: torch.device,
) -> Own:
    """Takes a process's share of a model's tensors to its device; what nobody reads stays with device 0 of the plan.

    Args:
        model: The whole model. A tensor on the meta device becomes one with undefined values.
        owners: Devices of the plan by first name, of what the graph reads.
        constants: Tensors of the graph that are neither parameters nor buffers.
        rank: Of this process, which is the device of the plan.
        device: Where its share goes.
    """
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    owners_of = {name: owners.get(name, (0,)) for name in everything}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for name, tensor in everything.items():
        if rank not in owners_of[name]:
            continue
        value = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            parameters[name] = nn.Parameter(value, requires_grad=tensor.requires_grad)
        else:
            buffers[name] = value
    return Own(parameters, buffers, owners_of).holding(constants, device)


def register(tree: nn.Module, model: nn.Module, own: Own) -> None:
    """Gives a module the own tensors under the names that they have in the model, every tied name included."""
    not_persistent = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for name, first in first_names(model).items():
        path, _, key = name.rpartition(".")
        if first in own.parameters:
            _below(tree, path).register_parameter(key, own.parameters[first])
        elif first in own.buffers:
            _below(tree, path).register_buffer(key, own.buffers[first], persistent=name not in not_persistent)


def _below(tree: nn.Module, path: str) -> nn.Module:
    for key in path.split(".") if path else ():
        if key not in tree._modules:
            tree.add_module(key, nn.Module())
        tree = tree._modules[key]  # type: ignore[assignment]
    return tree


def agree(own: Own) -> None:
    """Makes tensors that several processes hold equal: all take the values of the first that holds it."""
    holders: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for name, tensor in [*own.parameters.items(), *own.buffers.items()]:
        if name in own.owners:
            who = tuple(sorted(own.owners[name]))
            if len(who) > 1:
                holders.setdefault(who, []).append(tensor.detach())
    for who, tensors in sorted(holders.items()):
        _sync_params_and_buffers(group_of(who), tensors, _BUCKET_BYTES, src=0)  # in buckets by dtype
