"""Which process is which device of a plan."""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.torch_adapter import default_group

_made: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], str], Any]] = weakref.WeakKeyDictionary()


def group_of(ranks: Iterable[int], purpose: str = "") -> dist.ProcessGroup:
    """Returns the process group of some ranks; only they call this, all of them in the same order of groups.

    Args:
        ranks: Global ranks.
        purpose: Groups of the same ranks for different purposes are different, so that their messages cannot be mixed up.
    """
    default = dist.group.WORLD
    key = (tuple(sorted(set(ranks))), purpose)
    groups = _made.setdefault(default, {})
    if key not in groups:
        timeout = timedelta(seconds=default_timeout_s())  # other groups do not take it over by themselves
        # torch takes the number of groups that a process has made so far into the name of one that its members make by
        # themselves, and they wait for each other for ever when some of them are in more groups than others.
        name = hashlib.blake2b(f"rlplace {attempt()} {key[1]} {key[0]}".encode(), digest_size=20).hexdigest()
        with mock.patch.object(c10d, "_hash_ranks_to_str", lambda ranks: name):
            groups[key] = dist.new_group(list(key[0]), use_local_synchronization=True, timeout=timeout)
    return groups[key]


def attempt() -> int:
    """Returns how often torchrun has restarted the job: its store outlives that, with all that the attempt before left
    in it.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def start_group(backend: str, timeout_s: float) -> None:
    """Makes the default process group of a torchrun job, or of one process alone.

    ``init_process_group`` alone may find the addresses of the attempt before in the store after a restart.

    Args:
        backend: Backend of torch.distributed.
        timeout_s: How long one of its operations may take.
    """
    limit = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        store, rank, world = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
    else:
        store, rank, world = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    mine = dist.PrefixStore(f"rlplace/attempt {attempt()}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=mine, rank=rank, world_size=world, timeout=limit)
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit  # type: ignore[attr-defined]  # what torch's meshes take
    _patient(dist.group.WORLD)  # now, while nobody is busy


def end_group() -> None:
    """Ends the process groups, if there are any."""
    gc.collect()  # models under fully_shard are in cycles and hold groups, whose threads must end before the interpreter does
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    """A barrier of all ranks, on this one's own device, which torch would guess with a warning."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def default_timeout_s() -> float:
    """Returns the timeout of the default group, which is where a program says how long is too long."""
    group = default_group()
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else dist.distributed_c10d.default_pg_timeout.total_seconds()


@dataclass(frozen=True)
class Ranks:
    """The processes that run a plan, and which of them this one is.

    Device d of the cluster that a placement was made for is the process of rank d.

    Attributes:
        rank: Number of this process.
        device: Where this process computes.
        replicas: The ranks of every replica; a placement has one.
    """

    rank: int
    device: torch.device
    replicas: tuple[tuple[int, ...], ...]

    @property
    def replica(self) -> int | None:
        """Number of the replica that this rank belongs to; None: the plan does not use this rank."""
        return next((r for r, row in enumerate(self.replicas) if self.rank in row), None)


def part_text(plan: PlacementPlan, rank: int) -> str:
    """What a process runs of a plan, for messages: its stages."""
    devices = devices_of(plan)
    if rank >= len(devices):
        return "not in the plan"
    device = devices[rank]
    if plan.strategy is not None:
        here = [number for number, stage in enumerate(plan.strategy.pipelines[0].stages) if device in stage.devices]
    else:
        here = [device] if device in plan.device_of_group else []
    if not here:
        return "no stage"
    return f"stage {here[0]}" if len(here) == 1 else f"stages {', '.join(map(str, here))}"


def devices_of(plan: PlacementPlan) -> Sequence[int]:
    """Returns device of every process that a plan needs: all up to the last that a placement uses, those of a strategy."""
    return range(int(plan.device_of_group.max(initial=0)) + 1) if plan.strategy is None else sorted(plan.strategy.devices)


def ranks_of(plan: PlacementPlan, device: torch.device) -> Ranks:
    """Matches the plan's devices with the processes of the default process group.

    Raises:
        InputError: Too few processes.
    """
    world, used = dist.get_world_size(), tuple(devices_of(plan))
    if world < len(used):
        raise InputError(
            f"distribute: the plan uses {len(used)} devices, but there are {world} processes; start one per device"
        )
    return Ranks(dist.get_rank(), device, (used,))


def check_same_plan(plan: PlacementPlan) -> None:
    """Refuses processes that were given different plans, which would wait for each other for ever.

    Raises:
        InputError: On every rank.
    """
    fingerprints = gather_objects(plan.fingerprint)
    other = next((rank for rank, value in enumerate(fingerprints) if value != fingerprints[0]), None)
    if other is not None:
        raise InputError(
            f"distribute: ranks 0 and {other} have different plans; make the plan once, save it and load it on every rank "
            "(a planner with a time limit may find another plan each time)"
        )


def gather_objects(own: Any) -> list[Any]:
    """What all ranks tell, in order, on every rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


_PATIENCE_S = 1800.0


def broadcast_object(said: Any) -> Any:
    """What rank 0 says, on every rank; not looked at elsewhere.

    Before it says it, rank 0 may be busy for longer than processes may wait for each other in the process group.
    """
    heard = [said]
    dist.broadcast_object_list(heard, 0, _patient(dist.group.WORLD))
    return heard[0]


@lru_cache(maxsize=1)
def _patient(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns all processes, which may wait for each other for long."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE_S))


def one_line(error: BaseException, limit: int = 200) -> str:
    """Returns the first sentence of a torch.distributed error, without its stack of native frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
