"""Parameters that stages share: each stage has a copy, and their gradients are summed after the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlplace.plan.strategy import Pipeline
from rlplace.runtime.native.blocks import owner
from rlplace.runtime.native.mesh import Place


class Ties:
    """The ties that stages part. Every process of the job makes it, because it makes process groups.

    Args:
        ties: Names of parameters that are one tensor, for every such tensor.
        pipeline: What the strategy says; a name belongs to the stage whose block it lies in.
        place: Where this process stands.
    """

    def __init__(self, ties: Sequence[Sequence[str]], pipeline: Pipeline, place: Place) -> None:
        stage_of_block = {block: number for number, stage in enumerate(pipeline.stages) for block in stage.blocks}
        self._copies: list[tuple[dict[int, str], Any]] = []
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}
        for names in ties:
            name_of_stage: dict[int, str] = {}
            for name in names:
                block = owner(name, stage_of_block)
                if block is not None:
                    name_of_stage.setdefault(stage_of_block[block], name)
            if len(name_of_stage) < 2:
                continue
            places = sorted({pipeline.device_sets.index(pipeline.stages[stage].devices) for stage in name_of_stage})
            groups = place.mesh.mesh[places].reshape(len(places), -1).T.tolist()
            made = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in groups]
            own = next((group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks), None)
            self._copies.append(({s: name for s, name in name_of_stage.items() if s in place.stages}, own))

    def part(self, bodies: Mapping[int, nn.Module]) -> None:
        """Gives each stage of this process a parameter of its own, before it is shared out."""
        for name_of_stage, _ in self._copies:
            for stage, name in list(name_of_stage.items())[1:]:
                shared = bodies[stage].get_parameter(name)
                fresh = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
                for module in bodies[stage].modules():
                    for key, parameter in module.named_parameters(recurse=False):
                        if parameter is shared:
                            setattr(module, key, fresh)

    def begin(self, bodies: Mapping[int, nn.Module]) -> None:
        """Puts gradients of earlier steps aside, which are sums already."""
        copies = [bodies[stage].get_parameter(name) for names, _ in self._copies for stage, name in names.items()]
        self._before = {copy: copy.grad for copy in copies}
        for copy in copies:
            copy.grad = None

    def sum_gradients(self, bodies: Mapping[int, nn.Module]) -> None:
        """Gives every copy the sum of all copies' gradients of this step, added to those of earlier steps."""
        for name_of_stage, group in self._copies:
            if not name_of_stage:
                continue
            copies = [bodies[stage].get_parameter(name) for stage, name in name_of_stage.items()]
            local = [_local(copy.grad) if copy.grad is not None else torch.zeros_like(_local(copy)) for copy in copies]
            total = torch.stack(local).sum(0) if len(local) > 1 else local[0].clone()
            if group is not None:
                dist.all_reduce(total, group=group)
            for copy, own in zip(copies, local, strict=True):
                if copy.grad is not None:
                    own.copy_(total)
                before = self._before.pop(copy)
                if before is not None:
                    copy.grad = before if copy.grad is None else copy.grad + before


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
