"""Gradients of parameters that several processes hold, and the norm of all gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from rlplace.runtime.distributed.ranks import Ranks, group_of


def sum_gradients(parameters: Mapping[str, nn.Parameter], owners: Mapping[str, tuple[int, ...]], ranks: Ranks) -> None:
    """Adds up the gradients of every parameter over all processes that hold it, coalesced by holders.

    A parameter without a gradient on some of them counts as zero there; one without a gradient on all of them keeps none.
    """
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        who = ranks.holders(owners[name])
        if parameter.requires_grad and len(who) > 1:
            groups.setdefault(who, []).append(parameter)
    for who, shared in sorted(groups.items()):
        group = group_of(who)
        has = torch.tensor([p.grad is not None for p in shared], dtype=torch.int32, device=shared[0].device)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
        kept = [p for p, some in zip(shared, has.tolist(), strict=True) if some]
        for parameter in kept:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in kept:
            by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)  # type: ignore[arg-type]
        for gradients in by_dtype.values():
            flat = torch._utils._flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=group)
            for gradient, value in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(value)


def clip_grad_norm(
    parameters: Mapping[str, nn.Parameter],
    owners: Mapping[str, tuple[int, ...]],
    ranks: Ranks,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients of all processes so that their common norm is at most `max_norm`; all processes of the job call it.

    Args:
        parameters: Those of this process.
        owners: Devices of the plan that hold a parameter, by name; what several hold counts once.
        ranks: The processes.
        max_norm: Upper limit.
        norm_type: 2 for the Euclidean norm, ``float("inf")`` for the largest element.
        error_if_nonfinite: Whether a norm that is not finite is an error, as in `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before, the same on every process.

    Raises:
        RuntimeError: The norm is not finite, and that is an error.
    """
    infinite = norm_type == float("inf")
    total = torch.zeros((), device=ranks.device, dtype=torch.float64)
    for name, parameter in parameters.items():
        grad = parameter.grad
        if grad is None:
            continue
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
        if owners[name][0] == ranks.plan_device:
            total = torch.maximum(total, norm.double()) if infinite else total + norm.double() ** norm_type
    dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
    norm = total if infinite else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {float(norm)}; they cannot be scaled to {max_norm}")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
