"""Gradients over stages, replicas and tensor groups that torch's wrappers leave to be summed.

Each stage has a copy of a parameter that stages share, and the copies' gradients are summed after the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlplace.plan.strategy import Pipeline
from rlplace.runtime.state.whole import local_part, own_part, whole_tensor
from rlplace.runtime.strategy.cut import StageGraph
from rlplace.runtime.strategy.mesh import Place


@dataclass(frozen=True)
class _Tie:
    """One tie: the name of its copy in each stage of this process, the number of stages that have one, and their processes."""

    names: dict[int, str]
    stages: int
    group: Any


def copies_of(names: Sequence[str], stages: Sequence[StageGraph]) -> dict[int, str]:
    """By number of the stages that have a copy of a tied parameter, its name there."""
    held = {n: next((name for name in names if name in stage.parameters), None) for n, stage in enumerate(stages)}
    return {number: name for number, name in held.items() if name is not None}


class Ties:
    """The ties that stages part. Every process of the job makes it, because it makes process groups.

    Args:
        ties: Names of parameters that are one tensor, for every such tensor.
        pipeline: What the strategy says.
        stages: The stages of the cut.
        place: Where this process stands.
    """

    def __init__(self, ties: Sequence[Sequence[str]], pipeline: Pipeline, stages: Sequence[StageGraph], place: Place) -> None:
        self._ties: list[_Tie] = []
        self._unlike, self._processes = pipeline.unlike_meshes, place.mesh.size()
        for names in ties:
            name_of_stage = copies_of(names, stages)
            if len(name_of_stage) < 2:
                continue
            held_by = dict.fromkeys(pipeline.stages[stage].devices for stage in name_of_stage)
            columns = [[place.ranks[device] for device in devices] for devices in held_by]
            if pipeline.unlike_meshes:
                groups = [[rank for ranks in columns for rank in ranks]]
            else:
                groups = [list(ranks) for ranks in zip(*columns, strict=True)]
            made = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in groups]
            own = next((group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks), None)
            mine = {stage: name for stage, name in name_of_stage.items() if stage in place.stages}
            self._ties.append(_Tie(mine, len(name_of_stage), own))

    def part(self, bodies: Mapping[int, nn.Module]) -> None:
        """Gives each stage of this process a parameter of its own, before it is shared out."""
        for tie in self._ties:
            for stage, name in list(tie.names.items())[1:]:
                shared = bodies[stage].get_parameter(name)
                fresh = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
                for module in bodies[stage].modules():
                    for key, parameter in module.named_parameters(recurse=False):
                        if parameter is shared:
                            setattr(module, key, fresh)

    def copies(self, bodies: Mapping[int, nn.Module]) -> dict[nn.Parameter, int]:
        """How many stages hold each parameter that stages share, for those of this process."""
        return {bodies[stage].get_parameter(name): tie.stages for tie in self._ties for stage, name in tie.names.items()}

    def sum_gradients(self, bodies: Mapping[int, nn.Module]) -> None:
        """Gives every copy the sum of all copies' gradients of this step, which are all that there are."""
        for tie in self._ties:
            if not tie.names:
                continue
            copies = [bodies[stage].get_parameter(name) for stage, name in tie.names.items()]
            if self._unlike:
                self._sum_whole(tie, copies)
                continue
            local = [local_part(copy.grad) if copy.grad is not None else torch.zeros_like(local_part(copy)) for copy in copies]
            total = torch.stack(local).sum(0) if len(local) > 1 else local[0].clone()
            if tie.group is not None:
                dist.all_reduce(total, group=tie.group)
            for copy, own in zip(copies, local, strict=True):
                if copy.grad is not None:
                    own.copy_(total)

    def _sum_whole(self, tie: _Tie, copies: Sequence[nn.Parameter]) -> None:
        """Stages that cut the parameter in unlike ways sum it whole; every process of a stage counts as its part."""
        gradients = [copy.grad if copy.grad is not None else torch.zeros_like(copy.detach()) for copy in copies]
        total = torch.stack([whole_tensor(gradient) for gradient in gradients]).sum(0) / self._processes
        if tie.group is not None:  # else one process holds all copies
            dist.all_reduce(total, group=tie.group)
        for copy in copies:
            copy.grad = own_part(total, copy) if isinstance(copy, DTensor) else total.clone()


def left_out(parameter: torch.Tensor) -> bool:
    """Whether `fully_shard` and `replicate` go without it: they take no complex ones, none without dimensions or elements."""
    return not isinstance(parameter, DTensor) and (parameter.is_complex() or not parameter.dim() or not parameter.numel())


def average_left_out(parameter: torch.Tensor, place: Place) -> None:
    """Averages a gradient over the replicas, where torch's wrappers leave its parameter out; once more changes nothing."""
    if parameter.grad is not None and left_out(parameter):
        for axis in ("replicate", "shard"):
            if place.mesh[axis].size() > 1:
                dist.all_reduce(parameter.grad, group=place.mesh[axis].get_group())
        parameter.grad /= place.data_degree


def sum_parts(parameter: torch.Tensor) -> None:
    """A gradient of partial sums over the tensor axis is summed, as its parameter is held."""
    if isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor):
        if parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
