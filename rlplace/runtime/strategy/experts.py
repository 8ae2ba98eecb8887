"""Experts over an expert group: each process holds some whole, and works on all tokens of the group that chose them.

A module of experts has parameters that are stacked by expert, ``[experts, ...]``, and a forward that takes tokens, the experts
that each has chosen and their weights, as those of transformers have. Tokens travel by all-to-all, its own code runs on
those that came, results travel back, and are weighed where the tokens are; none is dropped. Parameters are DTensors, cut by
expert, so that `fully_shard` shares them over the data ranks that remain, and checkpoints hold the plain model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlplace.runtime.torch_adapter import all_to_all, with_parameters

NO_EXPERTS = (
    "no module has `num_experts` stacked weights and a forward(hidden_states, top_k_index, top_k_weights), as the experts of "
    "transformers have"
)

_COUNT = "num_experts"


def is_mixture(module: nn.Module) -> bool:
    """Returns whether a module has stacked experts, and takes tokens with their experts and weights."""
    held = dict(module.named_parameters())
    if not held or any("." in name for name in held) or not isinstance(count := getattr(module, _COUNT, None), int):
        return False
    names = [*inspect.signature(module.forward).parameters]
    takes = len(names) == 3 and any(word in names[1] for word in ("index", "indices", "experts")) and "weight" in names[2]
    return takes and all(parameter.dim() > 1 and len(parameter) == count for parameter in held.values())


def common_experts(model: nn.Module) -> int:
    """Returns the number of experts of all modules of experts, of unlike ones what these have in common; 0 without any."""
    return gcd(*(getattr(module, _COUNT) for module in model.modules() if is_mixture(module)))


def spread_experts(root: nn.Module, mesh: DeviceMesh, tensor: DeviceMesh) -> list[nn.Module]:
    """Makes processes of an expert group hold their experts alone, and exchange tokens; returns the modules of experts.

    Gradients of experts are sums over the tokens of the group, and replicas average them: pytorch #160285.

    Args:
        root: Its modules of experts, real or on the meta device, are changed in place.
        mesh: The expert group.
        tensor: The tensor group, which divides its tokens.
    """
    found = [module for module in root.modules() if is_mixture(module)]
    for module in found:
        for name, whole in list(module.named_parameters()):
            own = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            part = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        setattr(module, _COUNT, getattr(module, _COUNT) // mesh.size())
        forward = partial(_exchange, module, module.forward, mesh, tensor.size() / mesh.size())
        vars(module)["forward"] = forward if tensor.size() == 1 else partial(_divide, forward, tensor)
    return found


def _divide(forward: Callable[..., torch.Tensor], mesh: DeviceMesh, *args: torch.Tensor) -> torch.Tensor:
    """Runs a forward on this process's part of the rows, which all of a tensor group have; returns all rows of its result."""
    shape, stride = args[0].shape, args[0].stride()
    parts = [
        DTensor.from_local(value, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)]) for value in args
    ]
    made = DTensor.from_local(
        forward(*(part.to_local() for part in parts)), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    return made.redistribute(placements=[Replicate()]).to_local().clone()  # a view loses the hooks of its backward to writes


def _exchange(
    module: nn.Module,
    forward: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
    scale: float,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Runs a module of experts on all tokens of the group: [tokens, width]; `chosen` and `weights` are [tokens, choices]."""
    group, degree, experts = mesh.get_group(), mesh.size(), getattr(module, _COUNT)
    order = chosen.flatten().argsort(stable=True)
    sent = torch.bincount(chosen.flatten(), minlength=degree * experts).view(degree, experts)
    came = all_to_all(sent, None, None, group)  # by sender and own expert
    out, back = sent.sum(1).tolist(), came.sum(1).tolist()
    rows = all_to_all(tokens[order // chosen.shape[1]], back, out, group)
    own = torch.arange(experts, device=rows.device).repeat(degree).repeat_interleave(came.flatten())
    if empty := not len(rows):  # its backward has to run as that of all others, and its experts have gradients of zero
        rows, own = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), own.new_zeros(1)
    local = {name: _own_part(parameter, scale) for name, parameter in module.named_parameters()}
    with with_parameters(module, local):
        made = forward(rows, own.unsqueeze(1), weights.new_ones(len(rows), 1))
    made = all_to_all(made[:0] if empty else made, out, back, group)[order.argsort()]
    return (made.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).to(made.dtype)


def _own_part(parameter: Any, scale: float) -> torch.Tensor:
    part: torch.Tensor = parameter.to_local()
    if part.requires_grad:
        part.register_hook(lambda gradient: gradient * scale)
    return part
