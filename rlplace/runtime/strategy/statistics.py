"""Statistics of BatchNorm where a batch is divided over replicas: those of a replica, as under DDP, or those of all of them.

With a replica's own statistics, all replicas hold the running ones of the first, as DDP's broadcast of buffers has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

from rlplace.model.torch_adapter import FakeTensor
from rlplace.runtime.strategy.mesh import MeshPlace
from rlplace.runtime.torch_adapter import BatchNorm, NormBase, NormOfGroup, broadcast_in_buckets

_BUCKET_BYTES = 1 << 26


class BatchStatistics(NormOfGroup):
    """SyncBatchNorm over the replicas of a stage; on processors, too, for which torch has none and DDP refuses it.

    Attributes:
        groups: The processes of the replicas, along each axis of the mesh that has several; without any: this one alone.
    """

    groups: tuple[Any, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes values [samples, channels, ...] by the mean and variance of all replicas' samples."""
        if not self.training or not self.groups or isinstance(input, FakeTensor):
            return super().forward(input)
        return self.on_gpus(input) if input.device.type != "cpu" and len(self.groups) == 1 else self._in_two_sums(input)

    def _in_two_sums(self, input: torch.Tensor) -> torch.Tensor:
        """Computes the two moments one after the other: a difference of sums would lose digits."""
        self._check_input_dim(input)
        axes, shape = [0, *range(2, input.dim())], [1, -1, *[1] * (input.dim() - 2)]
        values = input if input.dtype == torch.float64 else input.float()
        count = values.new_full((1,), values.numel() / values.shape[1])
        sums = self._sum(torch.cat([values.sum(axes), count]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centered = values - mean.view(shape)
        variance = self._sum(centered.square().sum(axes)) / count
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        normalized = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(input.dtype)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up over all replicas."""
        for group in self.groups:
            values = all_reduce(values, group=group)
        return values

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), factor)
        self.running_var.lerp_(variance.to(self.running_var), factor)


def join_statistics(model: nn.Module, place: MeshPlace, *, everywhere: bool) -> None:
    """Makes norms of a stage compute their statistics over its replicas; modules stay the same objects.

    Args:
        model: The modules of the stage that this process runs.
        place: Coordinates of this process.
        everywhere: Whether all BatchNorms do, or only those that are SyncBatchNorms of all processes.
    """
    groups = tuple(place.mesh[axis].get_group() for axis in ("replicate", "shard") if place.mesh[axis].size() > 1)
    for module in model.modules():
        synced = isinstance(module, nn.SyncBatchNorm) and module.process_group is None
        if synced or (everywhere and isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)):
            module.__class__ = BatchStatistics
            vars(module)["groups"] = groups
            vars(module)["process_group"] = groups[0] if len(groups) == 1 else None


def statistics_of(roots: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Returns the running statistics of torch's norms."""
    norms = (module for root in roots for module in root.modules() if isinstance(module, NormBase))
    return [buffer for module in norms for buffer in module.buffers(recurse=False)]


@torch.no_grad()
def take_from_first_replica(statistics: list[torch.Tensor], place: MeshPlace) -> None:
    """Gives all replicas of a stage the running statistics of the first; all of them call it."""
    for axis in ("shard", "replicate"):
        if statistics and place.mesh[axis].size() > 1:
            group: dist.ProcessGroup = place.mesh[axis].get_group()
            broadcast_in_buckets(group, statistics, _BUCKET_BYTES, src=0)
