"""Which process is which device of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan


@dataclass(frozen=True)
class Ranks:
    """The processes that run a plan, and which of them this one is.

    Device d of the cluster that a plan was made for is the process of rank d.

    Attributes:
        rank: Number of this process.
        world: Number of processes.
        device: Where this process computes.
        replicas: Replica r runs the plan's device i on rank ``replicas[r][i]``.
    """

    rank: int
    world: int
    device: torch.device
    replicas: tuple[tuple[int, ...], ...]

    @property
    def replica(self) -> int | None:
        """Number of the replica that this rank belongs to; None: the plan does not use this rank."""
        return next((r for r, row in enumerate(self.replicas) if self.rank in row), None)

    @property
    def plan_device(self) -> int | None:
        """The device of the plan that this rank is; None: the plan does not use this rank."""
        return None if self.replica is None else self.replicas[self.replica].index(self.rank)

    def data_parallel_ranks(self, plan_device: int) -> tuple[int, ...]:
        """The ranks that run one device of the plan, replica by replica."""
        return tuple(row[plan_device] for row in self.replicas)

    def holders(self, plan_devices: Iterable[int]) -> tuple[int, ...]:
        """The ranks of all replicas that hold what some devices of the plan hold."""
        return tuple(sorted(rank for plan_device in plan_devices for rank in self.data_parallel_ranks(plan_device)))

    def rank_of(self, plan_device: int) -> int:
        """The rank that is a device of the plan in this rank's replica (in the first one for a rank outside the plan)."""
        return self.replicas[self.replica or 0][plan_device]


def part_text(plan: PlacementPlan, plan_device: int | None) -> str:
    """What a device of the plan runs, for messages: its stages."""
    if plan_device is None:
        return "not in the plan"
    stages = plan.device_of_group if plan.stage_of_group is None else plan.stage_of_group
    here = sorted({int(stage) for stage, device in zip(stages, plan.device_of_group, strict=True) if device == plan_device})
    if not here:
        return "no stage"
    return f"stage {here[0]}" if len(here) == 1 else f"stages {', '.join(map(str, here))}"


def devices_of(plan: PlacementPlan) -> int:
    """How many devices one replica of a plan uses: an op of P parts takes the device of its group and those after it."""
    group_of = {op: number for number, group in enumerate(plan.groups or ()) for op in group.get("ops", ())}
    most = int(plan.device_of_group.max(initial=0)) + 1
    for op, dims in (plan.shards or {}).items():
        first = int(plan.device_of_group[group_of[op]]) if op in group_of else 0
        most = max(most, first + prod(dims.values()))
    return most


def ranks_of(plan: PlacementPlan, device: torch.device) -> Ranks:
    """Matches the plan's devices with the processes of the default process group.

    Raises:
        InputError: Too few processes, or no process group.
    """
    if not dist.is_initialized():
        raise InputError("distribute: there is no process group; start the script with torchrun, or call init_process_group")
    world = dist.get_world_size()
    used = devices_of(plan)
    rows = plan.replicas if plan.replicas is not None else [range(used)]
    replicas = tuple(tuple(int(d) for d in row) for row in rows)
    needed = max(max(row) for row in replicas) + 1
    if world < needed:
        raise InputError(f"distribute: the plan uses {needed} devices, but there are {world} processes; start one per device")
    return Ranks(dist.get_rank(), world, device, replicas)


def check_same_plan(plan: PlacementPlan, ranks: Ranks) -> None:
    """Refuses processes that were given different plans, which would wait for each other for ever.

    Raises:
        InputError: On every rank.
    """
    own = torch.tensor([int(plan.fingerprint[:15], 16)], device=ranks.device)
    fingerprints = [torch.zeros_like(own) for _ in range(ranks.world)]
    dist.all_gather(fingerprints, own)
    other = next((rank for rank, value in enumerate(fingerprints) if int(value) != int(fingerprints[0])), None)
    if other is not None:
        raise InputError(
            f"distribute: ranks 0 and {other} have different plans; make the plan once, save it and load it on every rank "
            "(a planner with a time limit may find another plan each time)"
        )
