"""The norm of all gradients over meshes of several kinds: every element counts once, wherever its copies are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from rlplace.runtime.distributed.state.whole import local_part


@torch.no_grad()
def clip_grad_norm_(
    parameters: Sequence[tuple[nn.Parameter, int]],
    processes: int,
    device: torch.device,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales gradients down to a norm, like `torch.nn.utils.clip_grad_norm_`; every process of the job calls it.

    Args:
        parameters: This process's parameters, each with the number of stages that have a copy of it.
        processes: Of one stage.
        device: Where this process computes.
        max_norm: The most that the norm may be.
        norm_type: 2 for the Euclidean norm, ``float("inf")`` for the largest element.
        error_if_nonfinite: Whether a norm that is not finite is an error.

    Returns:
        The norm before.

    Raises:
        RuntimeError: The norm is not finite, and that is an error.
    """
    infinite = norm_type == float("inf")
    total = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
    for parameter, stages in parameters:
        if parameter.grad is not None and parameter.grad.numel():
            copies = stages * processes // _parts(parameter.grad)
            norm = torch.linalg.vector_norm(local_part(parameter.grad).to(total), norm_type)
            total = torch.maximum(total, norm) if infinite else total + norm**norm_type / copies
    dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
    norm = total if infinite else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {float(norm)}; they cannot be scaled to {max_norm}")
    own = [parameter for parameter, _ in parameters]
    torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm, foreach=False)  # one operation takes one mesh
    return norm


def _parts(gradient: torch.Tensor) -> int:
    """Processes that a gradient is cut over; the others of the stage hold copies."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = (gradient.device_mesh.size(dim) for dim in range(gradient.device_mesh.ndim))
    return prod(size for size, cut in zip(sizes, gradient.placements, strict=True) if not isinstance(cut, Replicate))
