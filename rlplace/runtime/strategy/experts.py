"""Experts over an expert group: each process holds some whole, and works on all tokens of the group that chose them.

Tokens travel by all-to-all, a module's own code (`mixtures`) runs on those that came, results travel back, and are weighed
where the tokens are; none is dropped. Parameters are DTensors, cut by expert, so that `fully_shard` shares them over the data
ranks that remain, and checkpoints hold the plain model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlplace.model.capture.fake import meta_copy
from rlplace.runtime.strategy.lists import ListedExperts, expert_lists
from rlplace.runtime.strategy.mixtures import COUNT, Form, form_of
from rlplace.runtime.torch_adapter import all_to_all, with_parameters


def spread_experts(root: nn.Module, mesh: DeviceMesh, tensor: DeviceMesh) -> list[nn.Module]:
    """Makes processes of an expert group hold their experts alone, and exchange tokens; returns the modules of experts.

    Gradients of experts are sums over the tokens of the group, and replicas average them: pytorch #160285.

    Args:
        root: Its modules of experts, real or on the meta device, are changed in place.
        mesh: The expert group.
        tensor: The tensor group, which divides its tokens.
    """
    found = [(module, form) for module in root.modules() if (form := form_of(module)) is not None]
    for module, form in found:
        for name, whole in list(module.named_parameters()):
            own = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            part = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        experts = getattr(module, COUNT)
        setattr(module, COUNT, experts // mesh.size())
        signature = inspect.signature(module.forward)
        places = [form.index(name) for name in signature.parameters]
        code = partial(_on_own_experts, module, module.forward, places, tensor.size() / mesh.size())
        exchange = partial(_exchange, code, mesh, experts) if form.chosen else partial(_exchange_rows, code, mesh)
        if tensor.size() > 1:
            exchange = partial(_divide, exchange, tensor, 0 if form.chosen else 1)
        vars(module)["forward"] = partial(_called, exchange, signature, experts, form)
    return [module for module, _ in found] + [
        expert for _, mixture, name in [*expert_lists(root)] for expert in _spread_list(mixture, name, mesh)
    ]


def _spread_list(mixture: nn.Module, name: str, mesh: DeviceMesh) -> list[nn.Module]:
    """Makes this process hold its part of a list of experts; returns its own."""
    held: Any = mixture._modules[name]
    own = len(held) // mesh.size()
    first, one = own * mesh.get_local_rank(), meta_copy(held[0])
    for number in [n for n in range(len(held)) if not first <= n < first + own]:
        held[number] = nn.Module()
    experts = [*held[first : first + own]]
    listed = ListedExperts(mixture, name, mesh, experts, one)
    listed.exchange = partial(_exchange, listed.run_own, mesh, len(held))
    vars(mixture)["forward"] = listed
    return experts


def _called(
    exchange: Callable[..., torch.Tensor], signature: inspect.Signature, experts: int, form: Form, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Calls an exchange with the arguments of a module's forward; rows of one expert after the other get a dimension more."""
    named = signature.bind(*args, **kwargs).arguments
    if form.chosen:
        return exchange(*(named[name] for name in form))
    rows = named[form.tokens]
    made = exchange(rows.reshape(experts, -1, rows.shape[-1]))
    return made.flatten(0, 1).clone()  # a view loses the hooks of its backward to writes


def _on_own_experts(
    module: nn.Module, forward: Callable[..., torch.Tensor], places: Sequence[int], scale: float, *args: torch.Tensor
) -> torch.Tensor:
    """Runs a module's own code with the parameters of this process's experts, whose gradients are scaled.

    `places` are those of its arguments among `args`; a forward that transformers has wrapped takes them by position alone.
    """
    local = {name: _own_part(parameter, scale) for name, parameter in module.named_parameters()}
    with with_parameters(module, local):
        return forward(*(args[place] for place in places))


def _divide(forward: Callable[..., torch.Tensor], mesh: DeviceMesh, dim: int, *args: torch.Tensor) -> torch.Tensor:
    """Runs a forward on this process's part of the tokens, which all of a tensor group have; returns its whole result."""
    shape, stride = args[0].shape, args[0].stride()
    parts = [
        DTensor.from_local(value, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(dim)]) for value in args
    ]
    made = DTensor.from_local(
        forward(*(part.to_local() for part in parts)), mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
    )
    return made.redistribute(placements=[Replicate()]).to_local().clone()  # a view loses the hooks of its backward to writes


def _exchange(
    code: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
    experts: int,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Runs a module of experts on all tokens of the group: [tokens, width]; `chosen` and `weights` are [tokens, choices]."""
    group, degree = mesh.get_group(), mesh.size()
    order = chosen.flatten().argsort(stable=True)
    sent = torch.bincount(chosen.flatten(), minlength=experts).view(degree, -1)
    came = all_to_all(sent, None, None, group)  # by sender and own expert
    out, back = sent.sum(1).tolist(), came.sum(1).tolist()
    rows = all_to_all(tokens[order // chosen.shape[1]], back, out, group)
    own = torch.arange(sent.shape[1], device=rows.device).repeat(degree).repeat_interleave(came.flatten())
    if empty := not len(rows):  # its backward has to run as that of all others, and its experts have gradients of zero
        rows, own = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), own.new_zeros(1)
    made = code(rows, own.unsqueeze(1), weights.new_ones(len(rows), 1))
    made = all_to_all(made[:0] if empty else made, out, back, group)[order.argsort()]
    return (made.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).to(made.dtype)


def _exchange_rows(code: Callable[..., torch.Tensor], mesh: DeviceMesh, rows: torch.Tensor) -> torch.Tensor:
    """Runs a module of experts on the rows of the group for each: [experts, rows, width]."""
    group, (experts, length) = mesh.get_group(), rows.shape[:2]
    own = experts // mesh.size()
    lengths = all_to_all(torch.full((mesh.size(),), length, device=rows.device), None, None, group).tolist()
    out, back = [own * length] * mesh.size(), [own * each for each in lengths]
    came = all_to_all(rows.flatten(0, 1), back, out, group).split(back)
    made = code(torch.cat([part.view(own, -1, part.shape[-1]) for part in came], 1).flatten(0, 1))
    parts = made.view(own, -1, made.shape[-1]).split(lengths, 1)
    return all_to_all(torch.cat([part.flatten(0, 1) for part in parts]), out, back, group).view(experts, length, -1)


def _own_part(parameter: Any, scale: float) -> torch.Tensor:
    part: torch.Tensor = parameter.to_local()
    if part.requires_grad:
        part.register_hook(lambda gradient: gradient * scale)
    return part
