"""The tensors of a model that a process holds, and whole tensors gathered from the parts that processes hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlplace.model.capture.fake import first_names, tensors_in
from rlplace.model.torch_adapter import pytree
from rlplace.runtime.base.model import DistributedModel
from rlplace.runtime.base.ranks import gather_objects, group_of
from rlplace.runtime.torch_adapter import StridedShard, assign_attribute, broadcast_in_buckets

_BUCKET_BYTES = 1 << 28


def own_tree(model: nn.Module, owners: Mapping[str, tuple[int, ...]], rank: int, device: torch.device) -> nn.Module:
    """Returns the tensors of a model that a process holds, on its device, in bare modules under the names that they have in the
    model.

    Args:
        model: The whole model. A tensor on the meta device becomes one with undefined values.
        owners: Devices of the plan by first name, for every parameter and buffer.
        rank: Of this process, which is the device of the plan.
        device: Where the tensors go.
    """
    made, taken = nn.Module(), dict[str, torch.Tensor]()
    for name, tensor in tensors_in(model).items():
        if rank in owners[name]:
            value = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
            trained = isinstance(tensor, nn.Parameter)
            taken[name] = nn.Parameter(value, requires_grad=tensor.requires_grad) if trained else value
    for name, first in first_names(model).items():
        if first in taken:
            assign_attribute(taken[first], made, name)
            path, _, key = name.rpartition(".")
            if key in model.get_submodule(path)._non_persistent_buffers_set:
                made.get_submodule(path)._non_persistent_buffers_set.add(key)
    return made


def agree(own: Mapping[str, torch.Tensor], owners: Mapping[str, tuple[int, ...]]) -> None:
    """Makes tensors that several processes hold equal: all take the values of the first that holds it."""
    holders: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for name, tensor in own.items():
        if len(owners[name]) > 1:
            holders.setdefault(owners[name], []).append(tensor.detach())
    for ranks, tensors in sorted(holders.items()):
        broadcast_in_buckets(group_of(ranks), tensors, _BUCKET_BYTES, src=0)  # in buckets by dtype


def whole_state_dict(model: DistributedModel) -> dict[str, torch.Tensor]:
    """Gathers the ``state_dict()`` of the undistributed model; every process calls it.

    Returns:
        On rank 0 all parameters and persistent buffers on the CPU, tied ones as one tensor; nothing on the other ranks.
    """
    names = {name: first_names(model.meta_model)[name] for name in tensors_of(model.meta_model.state_dict())}
    own = {names[name]: value for name, value in tensors_of(model.state_dict()).items()}
    gathered = gather_values(own, model.ranks.device)
    return {name: gathered[first] for name, first in names.items() if first in gathered}


def tensors_of(state: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    """Returns the tensors of a state."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def gather_values(own: Mapping[Any, Any], device: torch.device, *, everywhere: bool = False) -> dict[Any, Any]:
    """Gathers the values of all ranks by name; every rank calls it.

    Args:
        own: This rank's: any nesting of tensors and plain data. Of a name that several have, the one of the lowest rank is
            taken. None: there is none.
        device: Where the backend wants its tensors.
        everywhere: On every rank, tensors on its device. Otherwise on the CPU of rank 0, and empty on the others.
    """
    described = gather_objects(
        pytree.tree_map_only(torch.Tensor, lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), dict(own))
    )
    gathered: dict[Any, Any] = {}
    rank = dist.get_rank()
    for name in sorted({name for one in described for name in one}):
        source = next((r for r, one in enumerate(described) if one.get(name) is not None), 0)
        leaves, spec = pytree.tree_flatten(described[source].get(name))
        # All processes that hold a part of a tensor take part.
        held = [whole_tensor(leaf) for leaf in pytree.tree_leaves(own[name])] if own.get(name) is not None else leaves
        for at, (leaf, value) in enumerate(zip(leaves, held, strict=True)):
            if isinstance(leaf, torch.Tensor) and (everywhere or rank in (0, source)):
                found = value.detach().to(device).contiguous() if rank == source else torch.empty_like(leaf, device=device)
                sent = found.reshape(-1).view(torch.uint8)  # gloo does not know every dtype
                if everywhere:
                    dist.broadcast(sent, source)
                elif source != 0:
                    dist.recv(sent, source) if rank == 0 else dist.send(sent, 0)
                leaves[at] = found if everywhere else found.to("cpu", copy=True) if rank == 0 else None
        if everywhere or rank == 0:
            gathered[name] = pytree.tree_unflatten(leaves, spec)
    return gathered


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this process holds."""
    return value.to_local() if isinstance(value, DTensor) else value


def seen(parameter: nn.Parameter, value: Any = None) -> Any:
    """Returns a parameter, or a value that may have its shape, as checkpoints see it: parts of embedding tables as DTensors."""
    whole = getattr(parameter, "seen", None)
    value = parameter if value is None else value
    if whole is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    local, mesh, cuts = value.detach(), whole.device_mesh, whole.placements
    return DTensor.from_local(local, mesh, cuts, run_check=False, shape=whole.shape, stride=whole.stride())


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """Gathers a tensor; every process that has a part calls it.

    A weight that packs several is joined axis by axis: before torch 2.13 `full_tensor` does not support such a cut.
    """
    if not isinstance(value, DTensor):
        return value
    if not packed(value):
        return value.full_tensor()
    whole = value.to_local()
    for axis, placement in enumerate(value.placements):
        if isinstance(placement, (Shard, StridedShard)):  # on unlike dimensions, so that their order does not matter
            shape = [*whole.shape]
            shape[placement.dim] = value.shape[placement.dim]
            whole = placement._to_replicate_tensor(whole, value.device_mesh, axis, shape)
    return whole


def own_part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Returns this process's part of a tensor that every process has whole, cut like a DTensor."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def packed(value: Any) -> bool:
    """Returns whether the tensor axis cuts it in several places, as it does a weight of queries, keys and values.

    `torch.distributed.checkpoint` takes a process's part for one piece, so such tensors are written and read whole.
    """
    if not isinstance(value, DTensor) or value.device_mesh.mesh_dim_names is None:
        return False
    names = value.device_mesh.mesh_dim_names
    return any(name == "tensor" and isinstance(cut, StridedShard) for name, cut in zip(names, value.placements, strict=True))


def with_packed_whole(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tensors, packed ones whole; all processes that have a part of one call it."""
    return {name: whole_tensor(value) if packed(value) else value for name, value in tensors.items()}


@torch.no_grad()
def load_packed_whole(tensors: Mapping[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Fills tensors in place by `load`, packed ones by way of the whole."""
    parts = {name: value for name, value in tensors.items() if packed(value)}
    whole = {name: torch.empty(value.shape, dtype=value.dtype, device=value.device) for name, value in parts.items()}
    load({**tensors, **whole})
    for name, value in parts.items():
        value.to_local().copy_(own_part(whole[name], value).to_local())


class ParameterHooks:
    """Hooks of parameters, which run once a step on the gradient of the whole batch.

    Args:
        model: Its parameters lose their hooks, which torch would call with gradients of micro-batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hooks: dict[str, list[Any]] = {}
        self._after: dict[str, list[Any]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for hooks, found in ((self._hooks, parameter._backward_hooks), (self._after, _after_hooks(parameter))):
                if found:
                    hooks[name] = [*found.values()]
        for _, parameter in model.named_parameters():
            for found in (parameter._backward_hooks, _after_hooks(parameter)):
                if found:
                    found.clear()

    @property
    def names(self) -> list[str]:
        """Names of parameters with hooks."""
        return [*self._hooks, *self._after]

    def run(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Calls the hooks of gradients with whole ones, on every process that has a part of a parameter."""
        for name, hooks in self._hooks.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.grad is None:
                continue
            gradient = whole_tensor(parameter.grad)
            for hook in hooks:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            parameter.grad = own_part(gradient, parameter) if isinstance(parameter, DTensor) else gradient

    def run_after(self, name: str, parameter: nn.Parameter) -> None:
        """Calls the hooks that run after a gradient is accumulated, with this process's part of the parameter."""
        for hook in self._after.get(name, ()):
            hook(parameter)


def _after_hooks(parameter: nn.Parameter) -> dict[Any, Any] | None:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)
