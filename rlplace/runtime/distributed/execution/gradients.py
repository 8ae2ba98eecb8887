"""Gradients of parameters that several processes hold."""

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
