"""The state dict of the whole model, brought together on one process.

The state of the optimizers of all processes, brought together as that of one optimizer over the whole model.

The result is what ``optimizer.state_dict()`` returns where the undistributed model is trained, so a run can go on from it on
one device or by another plan. Its parameter groups are those of that optimizer if they list parameters in the model's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from rlplace.errors import InputError
from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.distributed.ranks import gather_objects
from rlplace.runtime.held import first_names


def whole_state_dict(model: DistributedModel) -> dict[str, torch.Tensor]:
    """What ``state_dict()`` of the undistributed model would return; every process calls it.

    Returns:
        On rank 0 all parameters and persistent buffers on the CPU, tied ones as one tensor; nothing on the other ranks.
    """
    names = {name: first_names(model.meta_model)[name] for name, value in _tensors(model.meta_model.state_dict()).items()}
    own = {names[name]: value for name, value in _tensors(model.state_dict()).items()}
    gathered = gather_tensors(own, model.ranks.device)
    return {name: gathered[first] for name, first in names.items() if first in gathered}


def _tensors(state: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def gather_tensors(own: Mapping[Any, torch.Tensor | None], device: torch.device) -> dict[Any, torch.Tensor]:
    """The tensors of all ranks by name, on the CPU of rank 0 (empty elsewhere); every rank calls it.

    Args:
        own: This rank's; of a name that several have, the one of the lowest rank is taken. None: there is none.
        device: Where the backend wants its tensors.
    """
    ranks = gather_objects({name: None if value is None else (value.shape, value.dtype) for name, value in own.items()})
    gathered: dict[Any, torch.Tensor] = {}
    rank = dist.get_rank()
    for name in sorted({name for told in ranks for name in told}):
        source = next((r for r, told in enumerate(ranks) if told.get(name) is not None), None)
        value = own.get(name)
        if isinstance(value, DTensor):
            value = whole_tensor(value)  # all that hold a part take part
        if source is None or rank not in (0, source):
            continue
        if rank != 0:
            assert value is not None
            dist.send(value.detach().to(device).contiguous(), 0)
        elif source == 0:
            assert value is not None
            gathered[name] = value.detach().cpu().clone()
        else:
            shape, dtype = ranks[source][name]
            buffer = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(buffer, source)
            gathered[name] = buffer.cpu()
    return gathered


def is_packed(value: Any) -> bool:
    """Whether the tensor axis cuts it in more places than one."""
    if not isinstance(value, DTensor) or value.device_mesh.mesh_dim_names is None:
        return False
    names = value.device_mesh.mesh_dim_names
    return any(name == "tensor" and isinstance(cut, _StridedShard) for name, cut in zip(names, value.placements, strict=True))


def whole_tensor(value: DTensor) -> torch.Tensor:
    """All of it; every process that has a part calls it.

    A weight that packs several is put together axis by axis: before torch 2.13 `full_tensor` does not know such a cut.
    """
    if not is_packed(value):
        return value.full_tensor()
    whole = value.to_local()
    for axis, placement in enumerate(value.placements):
        if isinstance(placement, (Shard, _StridedShard)):  # on unlike dimensions, so that their order does not matter
            shape = [*whole.shape]
            shape[placement.dim] = value.shape[placement.dim]
            whole = placement._to_replicate_tensor(whole, value.device_mesh, axis, shape)
    return whole


def own_part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This process's part of a tensor that every process has whole, cut as another one is."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole_optimizer_state(model: DistributedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer over the whole model; every process calls it.

    Args:
        model: The distributed model.
        optimizer: Over its parameters, with equal parameter groups on all processes.

    Returns:
        On rank 0 the state dict, on the CPU; an empty dict on the other ranks.
    """
    named = _named_groups(model, optimizer)
    state = {
        (name, key): value
        for group in named
        for name, parameter in group
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    tensors = _tensors(state)
    plain = {at: value for at, value in state.items() if at not in tensors}
    everyone = gather_objects(([[name for name, _ in group] for group in named], plain))
    values = {at: value for _, told in everyone for at, value in told.items()} | gather_tensors(tensors, model.ranks.device)
    if dist.get_rank() != 0:
        return {}
    order = _whole_order(model, [names for names, _ in everyone])
    number = {name: index for index, name in enumerate(name for group in order for name in group)}
    whole: dict[int, dict[str, Any]] = {}
    for (name, key), value in values.items():
        whole.setdefault(number[name], {})[key] = value
    groups = []
    start = 0
    for mine, listed in zip(optimizer.state_dict()["param_groups"], order, strict=True):
        groups.append({**mine, "params": list(range(start, start + len(listed)))})
        start += len(listed)
    return {"state": whole, "param_groups": groups}


def load_whole_optimizer_state(model: DistributedModel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Takes this process's part of an optimizer's state; every process calls it with the same state.

    Args:
        model: The distributed model.
        optimizer: Over its parameters.
        state: As `whole_optimizer_state` or an optimizer over the undistributed model gives it.

    Raises:
        InputError: It has other groups, or was made over other parameters.
    """
    named = _named_groups(model, optimizer)
    order = _whole_order(model, gather_objects([[name for name, _ in group] for group in named]))
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(group) for group in order]:
        raise InputError(
            f"optimizer state: its groups have {sizes} parameters, those of this optimizer {[len(group) for group in order]}; "
            "make the optimizer as it was made for the run that saved it"
        )
    shapes = {name: tuple(p.shape) for name, p in model.meta_model.named_parameters()}
    number = {
        name: index
        for group, saved in zip(order, state["param_groups"], strict=True)
        for name, index in zip(group, saved["params"], strict=True)
    }
    state_of = {
        id(parameter): {
            key: _own_part(shapes[name], parameter, value) for key, value in state["state"].get(number[name], {}).items()
        }
        for group in named
        for name, parameter in group
    }
    local: dict[int, dict[str, Any]] = {}
    groups, at = [], 0
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        groups.append({**saved, "params": list(range(at, at + len(group["params"])))})
        for parameter in group["params"]:
            local[at] = state_of.get(id(parameter), {})
            at += 1
    optimizer.load_state_dict({"state": {k: v for k, v in local.items() if v}, "param_groups": groups})


def _named_groups(model: DistributedModel, optimizer: torch.optim.Optimizer) -> list[list[tuple[str, torch.Tensor]]]:
    name_of = {id(parameter): name for name, parameter in model.trained()}
    return [[(name_of[id(p)], p) for p in group["params"] if id(p) in name_of] for group in optimizer.param_groups]


def _whole_order(model: DistributedModel, everyone: list[list[list[str]]]) -> list[list[str]]:
    """Names by group, each in the order of the model."""
    listed = [{name for mine in everyone for name in mine[g]} for g in range(len(everyone[0]))]
    return [[name for name, _ in model.meta_model.named_parameters() if name in group] for group in listed]


def _own_part(shape: tuple[int, ...], parameter: torch.Tensor, value: Any) -> Any:
    """What belongs to a rank's own part of a parameter: state of the parameter's shape is cut as the parameter is."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dim() == 0:
        return value
    if isinstance(parameter, DTensor):
        return own_part(value, parameter)
    return value
