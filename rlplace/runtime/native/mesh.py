"""The mesh of processes of a strategy, and this process's place in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlplace.errors import InputError
from rlplace.plan.strategy import Pipeline, Strategy
from rlplace.runtime.distributed.ranks import gather_objects

AXES = ("pipeline", "replicate", "shard", "tensor")
"""Axes of the mesh, outermost first."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where this process stands.

    Attributes:
        mesh: All processes, by `AXES`.
        device: The device that this process computes on.
        index: Its coordinate on each axis.
        stages: Numbers of the stages that it holds, in model order.
    """

    mesh: DeviceMesh
    device: torch.device
    index: dict[str, int]
    stages: tuple[int, ...]

    @property
    def replica(self) -> int:
        """Number of the replica that it is part of: its coordinate on replicate x shard."""
        return self.index["replicate"] * self.mesh["shard"].size() + self.index["shard"]

    def ranks_of_stage(self, pipeline: Pipeline, stage: int) -> int:
        """The process that holds a stage at this process's coordinates on all other axes."""
        place = pipeline.device_sets.index(pipeline.stages[stage].devices)
        return int(self.mesh.mesh[place, self.index["replicate"], self.index["shard"], self.index["tensor"]])


def check_same(model: nn.Module) -> None:
    """Refuses a model whose parameters are not the same on all processes; every process of the job calls it.

    Raises:
        InputError: They differ, or have no values yet.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("native: the model is on the meta device; give its parameters values first, the same on all processes")
    own = [float(parameter.detach().sum(dtype=torch.float64)) for parameter in model.parameters()]
    if any(other != own for other in gather_objects(own)):
        raise InputError("native: parameters differ between processes; build the model from one seed, or load one checkpoint")


def find_place(strategy: Strategy, device_type: str) -> Place:
    """Makes the mesh; every process of the job calls it.

    Devices of the strategy are counted in rising order: the first process runs the lowest device number.

    Raises:
        InputError: The job has another number of processes than the strategy has devices.
    """
    pipeline = strategy.pipelines[0]
    rank_of_device = {device: rank for rank, device in enumerate(sorted(strategy.devices))}
    if dist.get_world_size() != len(rank_of_device):
        raise InputError(
            f"native: the strategy has {len(rank_of_device)} devices, the job {dist.get_world_size()} processes; "
            f"start it with --nproc-per-node {len(rank_of_device)}, or as many over all hosts"
        )
    sets, first = pipeline.device_sets, pipeline.stages[0]
    shape = [len(sets), *(first.axis(name) for name in AXES[1:])]
    ranks = torch.tensor([[rank_of_device[device] for device in devices] for devices in sets]).view(shape)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
    index = dict(zip(AXES, mesh.get_coordinate() or (), strict=True))
    mine = sets[index["pipeline"]]
    held = tuple(number for number, stage in enumerate(pipeline.stages) if stage.devices == mine)
    device = (
        torch.device(device_type, torch.accelerator.current_device_index()) if device_type != "cpu" else torch.device("cpu")
    )
    return Place(mesh, device, index, held)
