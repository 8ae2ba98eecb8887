"""The mesh of processes of a strategy, and this process's coordinates in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlplace.errors import InputError
from rlplace.plan.strategy import Pipeline, Strategy
from rlplace.runtime.base.ranks import gather_objects

AXES = ("pipeline", "replicate", "shard", "tensor")
"""Axes of the mesh, outermost first; the context lies in `shard`, at level 0 in `replicate`, whose gradients are reduced."""

EXPERT_AXES = ("pipeline", "replicate", "expert_shard", "expert")
"""Axes of the parameters of experts: processes that share the same ones are as far apart as the expert group is large."""


@dataclass(frozen=True)
class Peer:
    """A process of a neighbouring stage."""

    rank: int  # in the job
    first: Fraction  # where its samples begin, as a share of this process's micro-batch
    samples: Fraction  # how many it has of them, as a share

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """Returns its rows of a value."""
        rows = len(value) if self.samples < 1 else 0
        return value.narrow(0, int(self.first * rows), int(self.samples * rows)) if rows else value


@dataclass(frozen=True, eq=False)
class MeshPlace:
    """The coordinates of a process."""

    mesh: DeviceMesh  # processes of the pipeline, by `AXES`; where stages have unlike meshes, those of this process's stages
    device: torch.device  # the device that this process computes on
    index: dict[str, int]  # its coordinate on each axis
    stages: tuple[int, ...]  # numbers of the stages that it holds, in model order
    ranks: Mapping[int, int]  # process of each device
    pipeline: Pipeline  # that this process is part of
    number: int = 0  # of that pipeline
    # the same by `EXPERT_AXES`, for each degree over which stages of this process spread experts
    experts: Mapping[int, DeviceMesh] = field(default_factory=dict)
    context: int = 1  # processes that divide the positions of a replica's samples
    tables: DeviceMesh | None = None  # the replicas, where they divide embedding tables

    @property
    def replica(self) -> int:
        """Number of the replica that it is part of: its coordinate on replicate x shard."""
        return self.column // self.context

    @property
    def column(self) -> int:
        """Coordinate among the processes that reduce gradients together: replicate x shard x context."""
        return self.index["replicate"] * self.mesh["shard"].size() + self.index["shard"]

    @property
    def columns(self) -> int:
        """Processes that reduce gradients together."""
        return self.mesh["replicate"].size() * self.mesh["shard"].size()

    @property
    def data_degree(self) -> int:
        """Replicas of this process's stages."""
        return self.columns // self.context

    @property
    def context_ranks(self) -> tuple[int, ...]:
        """Processes that divide the positions of this process's samples, in the order of their parts."""
        together = self.mesh.mesh[self.mesh.get_local_rank("pipeline"), :, :, self.index["tensor"]].flatten()
        return tuple(together[self.replica * self.context :][: self.context].tolist())

    def peers(self, pipeline: Pipeline, own: int, other: int, *, sends: bool) -> list[Peer]:
        """Returns the processes of another stage that have samples of this process's, in the order of the samples.

        Every process of a tensor group takes what it needs from one process, so some may have nothing to send. All stages
        divide positions alike, and processes with the same part exchange.

        Args:
            pipeline: The pipeline of the strategy.
            own: Number of a stage of this process.
            other: Number of the stage beside it.
            sends: Whether they take from this process, or it from them.
        """
        mine, theirs = pipeline.stages[own], pipeline.stages[other]
        width, other_width = (pipeline.data_degree // stage.data_degree for stage in (mine, theirs))
        first, columns = self.replica * width, range(theirs.axis("tensor"))
        column, scale = self.index["tensor"], (mine.axis("tensor"), theirs.axis("tensor"))
        part = self.column % self.context
        if sends:
            taking = [n for n in columns if n * scale[0] // scale[1] == column]
        else:
            taking = [column * scale[1] // scale[0]]
        found = []
        for replica in range(first // other_width, -(-(first + width) // other_width)):
            start, end = max(first, replica * other_width), min(first + width, (replica + 1) * other_width)
            for n in taking:
                rank = self.ranks[theirs.devices[(replica * self.context + part) * scale[1] + n]]
                found.append(Peer(rank, Fraction(start - first, width), Fraction(end - start, width)))
        return found


def _by_experts(ranks: torch.Tensor, degree: int) -> torch.Tensor:
    """Returns ranks by `EXPERT_AXES`, from those by `AXES`; without shares the context lies in `replicate`."""
    if ranks.shape[AXES.index("shard")] == 1:
        return ranks.flatten(1).unflatten(1, (-1, 1, degree))
    return ranks.flatten(2).unflatten(2, (-1, degree))


def check_same(model: nn.Module, weights: str | Path | None = None) -> None:
    """Refuses a model whose parameters are not the same on all processes; every process of the job calls it.

    Args:
        model: What makes parameters without values is compared.
        weights: What all parameters are loaded from instead.

    Raises:
        InputError: They differ.
    """

    def of(parameter: nn.Parameter) -> Any:
        if weights is not None:
            return str(weights)
        return parameter.deferred.digest() if parameter.is_meta else float(parameter.detach().sum(dtype=torch.float64))  # type: ignore[attr-defined]

    own = [of(parameter) for parameter in model.parameters()]
    if any(other != own for other in gather_objects(own)):
        raise InputError("native: parameters differ between processes; build the model from one seed, or load one checkpoint")


def find_place(strategy: Strategy, device_type: str) -> MeshPlace:
    """Makes the mesh; every process of the job calls it.

    Devices of the strategy are counted in rising order: the first process runs the lowest device number.

    Raises:
        InputError: The job has another number of processes than the strategy has devices.
    """
    rank_of_device = {device: rank for rank, device in enumerate(sorted(strategy.devices))}
    if dist.get_world_size() != len(rank_of_device):
        raise InputError(
            f"native: the strategy has {len(rank_of_device)} devices, the job {dist.get_world_size()} processes; "
            f"start it with --nproc-per-node {len(rank_of_device)}, or as many over all hosts"
        )
    places = [_place_in(pipeline, number, rank_of_device, device_type) for number, pipeline in enumerate(strategy.pipelines)]
    return next(place for place in places if place is not None)


def _place_in(pipeline: Pipeline, number: int, rank_of_device: Mapping[int, int], device_type: str) -> MeshPlace | None:
    """Makes the meshes of a pipeline, on every process of the job; returns the place of this one, None outside of it."""
    sets = pipeline.device_sets
    context = pipeline.stages[0].axis("context")
    axes = {stage.devices: [stage.axis(name) for name in AXES[1:]] for stage in reversed(pipeline.stages)}
    for own, sharded in {stage.devices: stage.sharding > 0 for stage in pipeline.stages}.items():
        axes[own][int(sharded)] *= context
    ranks = {own: [rank_of_device[device] for device in own] for own in sets}
    mine = next((place for place, own in enumerate(sets) if dist.get_rank() in ranks[own]), None)
    together = [[own] for own in sets] if pipeline.unlike_meshes else [list(sets)]
    numbers = [torch.tensor([ranks[own] for own in group]).view(len(group), *axes[group[0]]) for group in together]
    mesh, experts = _made(device_type, numbers, AXES), dict[int, DeviceMesh]()
    for degree in sorted({stage.expert for stage in pipeline.stages} - {1}):
        with_it = {stage.devices for stage in pipeline.stages if stage.expert == degree}
        spread = [_by_experts(own, degree) for own, group in zip(numbers, together, strict=True) if with_it & {*group}]
        if (made := _made(device_type, spread, EXPERT_AXES)) is not None:
            experts[degree] = made
    tables = None
    if any(stage.tables for stage in pipeline.stages):
        tables = _made(device_type, [own.flatten() for own in numbers], ("tables",))
    if mesh is None or mine is None:
        return None
    index = dict(zip(AXES, mesh.get_coordinate() or (), strict=True)) | {"pipeline": mine}
    held = tuple(stage for stage, own in enumerate(pipeline.stages) if own.devices == sets[mine])
    device = (
        torch.device(device_type, torch.accelerator.current_device_index()) if device_type != "cpu" else torch.device("cpu")
    )
    groups: dict[str, Any] = {"experts": experts, "tables": tables, "context": context}
    return MeshPlace(mesh, device, index, held, rank_of_device, pipeline, number, **groups)


def _made(device_type: str, ranks: Sequence[torch.Tensor], names: tuple[str, ...]) -> DeviceMesh | None:
    """Makes meshes, all of them on every process, because all make all groups; returns that of this process."""
    made = [DeviceMesh(device_type, own, mesh_dim_names=names) for own in ranks]
    return next((mesh for mesh in made if mesh.get_coordinate() is not None), None)
