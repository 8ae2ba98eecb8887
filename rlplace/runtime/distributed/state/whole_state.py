"""The state dict of the whole model, brought together on one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.held import first_names


def whole_state_dict(model: DistributedModel) -> dict[str, torch.Tensor]:
    """What ``state_dict()`` of the undistributed model would return; every process calls it.

    Returns:
        On rank 0 all parameters and persistent buffers on the CPU, tied ones as one tensor; nothing on the other ranks.
    """
    shape, own, ranks = model.meta_model, model.state_dict(), model.ranks
    first = first_names(shape)
    gathered: dict[str, torch.Tensor | None] = {}
    state: dict[str, torch.Tensor] = {}
    for name, meta in shape.state_dict().items():
        if not isinstance(meta, torch.Tensor):  # extra state of a module
            continue
        if first[name] not in gathered:
            value = own.get(name)
            if isinstance(value, DTensor):
                value = value.full_tensor()
            source = ranks.replicas[0][model.own_tensors.owners[first[name]][0]]
            gathered[first[name]] = to_first(value, meta.shape, meta.dtype, source, ranks.device)
        here = gathered[first[name]]
        if here is not None:
            state[name] = here
    return state


def to_first(value: Any, shape: Sequence[int], dtype: torch.dtype, source: int, device: torch.device) -> torch.Tensor | None:
    """Moves a tensor from one rank to the CPU of rank 0; those two ranks call it, others may.

    Args:
        value: On the rank `source`; not looked at elsewhere.
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        source: The rank that has it.
        device: Where the backend wants its tensors.

    Returns:
        On rank 0 a copy; None elsewhere.
    """
    rank = dist.get_rank()
    if rank == source == 0:
        return value.detach().cpu().clone()
    if rank == source:
        dist.send(value.detach().to(device).contiguous(), 0)
    elif rank == 0:
        buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
        dist.recv(buffer, source)
        return buffer.cpu()
    return None


def own_part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This process's part of a tensor that every process has whole, cut as another one is."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
