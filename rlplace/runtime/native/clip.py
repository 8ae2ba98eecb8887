"""The norm of all gradients over meshes of several kinds: every element counts once, wherever its copies are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from rlplace.runtime.native.mesh import Place


@torch.no_grad()
def clip_grad_norm_(parameters: Sequence[tuple[nn.Parameter, int]], place: Place, max_norm: float) -> torch.Tensor:
    """Scales gradients down to a norm, like `torch.nn.utils.clip_grad_norm_`; every process of the job calls it.

    Args:
        parameters: This process's parameters, each with the number of stages that have a copy of it.
        place: Where this process stands.
        max_norm: The most that the norm may be.

    Returns:
        The norm before.
    """
    total = torch.zeros((), device=place.device, dtype=torch.float64 if place.device.type == "cpu" else torch.float32)
    processes = place.mesh.size() // place.mesh["pipeline"].size()
    for parameter, stages in parameters:
        if parameter.grad is not None:
            copies = stages * processes // _parts(parameter.grad)
            total += _local(parameter.grad).to(total).square().sum() / copies
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter, _ in parameters:
        if parameter.grad is not None:
            own = _local(parameter.grad)
            own.mul_(scale.to(own))
    return norm


def _parts(gradient: torch.Tensor) -> int:
    """Processes that a gradient is cut over; the others of the stage hold copies."""
    if not isinstance(gradient, DTensor):
        return 1
    parts = 1
    for dim, placement in enumerate(gradient.placements):
        parts *= 1 if isinstance(placement, Replicate) else gradient.device_mesh.size(dim)
    return parts


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
