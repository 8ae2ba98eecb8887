"""The processes of a job: their groups, what they exchange as objects, and the device of a plan that each of them is."""

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
from torch import nn
from torch.distributed.rendezvous import rendezvous

from rlplace.errors import InputError
from rlplace.model.torch_adapter import pytree
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.torch_adapter import default_group

_PATIENCE_S = 1800.0
CALLS = 2
"""Calls that are checked; each costs about as much as one pass over every element of the batch and a message of a few bytes."""

_made: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], str], Any]] = weakref.WeakKeyDictionary()


def group_of(ranks: Iterable[int], purpose: str = "") -> dist.ProcessGroup:
    """Returns the process group of some ranks; only they call this, all of them in the same order of groups.

    Args:
        ranks: Global ranks.
        purpose: Groups of the same ranks for different purposes are different, so that their messages cannot be mixed up.
    """
    key = (tuple(sorted(set(ranks))), purpose)
    groups = _made.setdefault(dist.group.WORLD, {})
    if key not in groups:
        timeout = timedelta(seconds=default_timeout_s())  # new groups do not inherit it
        # torch names a group that its members make by themselves after the number of groups that a process has made so far;
        # processes that are in unlike numbers of groups would wait for each other for ever.
        name = hashlib.blake2b(f"rlplace {attempt()} {purpose} {key[0]}".encode(), digest_size=20).hexdigest()
        with mock.patch.object(c10d, "_hash_ranks_to_str", lambda ranks: name):
            groups[key] = dist.new_group(list(key[0]), use_local_synchronization=True, timeout=timeout)
    return groups[key]


def attempt() -> int:
    """Returns the number of restarts of the job by torchrun, whose store keeps the keys of the attempts before."""
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
    _patient(dist.group.WORLD)  # now, while all processes are idle


def end_group() -> None:
    """Ends the process groups, if there are any."""
    gc.collect()  # models under fully_shard are in cycles and hold groups, whose threads must end before the interpreter does
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Waits for all ranks, by a barrier on this one's own device, which torch would guess with a warning."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def default_timeout_s() -> float:
    """Returns the timeout of the default group, which is where a program says how long is too long."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    options = getattr(default_group()._get_backend(device), "options", None)
    return getattr(options, "_timeout", c10d.default_pg_timeout).total_seconds()


@dataclass(frozen=True)
class Ranks:
    """The processes that run a plan, and which of them this one is.

    Device d of the cluster that a placement was made for is the process of rank d.
    """

    rank: int  # number of this process
    device: torch.device  # where this process computes
    replicas: tuple[tuple[int, ...], ...]  # the ranks of every replica; a placement has one

    @property
    def replica(self) -> int | None:
        """Number of the replica that this rank belongs to; None: the plan does not use this rank."""
        return next((r for r, row in enumerate(self.replicas) if self.rank in row), None)


def devices_of(plan: PlacementPlan) -> Sequence[int]:
    """Returns the device of every process that a plan needs: all up to the last one of a placement, those of a strategy."""
    return range(int(plan.device_of_group.max(initial=0)) + 1) if plan.strategy is None else sorted(plan.strategy.devices)


def part_text(plan: PlacementPlan, rank: int) -> str:
    """Returns the stages that a process runs of a plan, for messages."""
    devices = devices_of(plan)
    if rank >= len(devices):
        return "not in the plan"
    device = devices[rank]
    where = ""
    if plan.strategy is None:
        here = [device] if device in plan.device_of_group else []
    else:
        number, own = next((n, one) for n, one in enumerate(plan.strategy.pipelines) if device in one.devices)
        here = [stage for stage, held in enumerate(own.stages) if device in held.devices]
        where = f" of pipeline {number}" if len(plan.strategy.pipelines) > 1 else ""
    return f"stage{'s' if len(here) > 1 else ''} {', '.join(map(str, here))}{where}" if here else "no stage"


def ranks_of(plan: PlacementPlan, device: torch.device) -> Ranks:
    """Matches the plan's devices with the processes of the default process group, which must be as many."""
    world, used = dist.get_world_size(), tuple(devices_of(plan))
    if world < len(used):
        raise InputError(
            f"distribute: the plan uses {len(used)} devices, but there are {world} processes; start one per device"
        )
    return Ranks(dist.get_rank(), device, (used,))


def check_same_plan(plan: PlacementPlan) -> None:
    """Refuses unlike plans on the processes, on every rank, since they would wait for each other for ever."""
    fingerprints = gather_objects(plan.fingerprint)
    other = next((rank for rank, value in enumerate(fingerprints) if value != fingerprints[0]), None)
    if other is not None:
        raise InputError(
            f"distribute: ranks 0 and {other} have different plans; make the plan once, save it and load it on every rank "
            "(a planner with a time limit may find another plan each time)"
        )


def check_first_batches(model: nn.Module, ranks: Ranks, share: str) -> None:
    """Makes the first calls of a distributed model compare their inputs over the processes that must get the same.

    A sampler or a loader that splits batches over processes, as for data parallel training, would give each process of a
    replica another batch, and the model would silently train on mixtures of them. `share` is that of `rlplace.distribute`.
    """
    alike = ranks.replicas if share == "replica" else [{rank for row in ranks.replicas for rank in row}]
    if max(map(len, alike)) < 2:
        return
    left = [CALLS]

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        digests = gather_objects(digest((args, kwargs)))
        left[0] -= 1
        if left[0] == 0:
            handle.remove()
        if any(len({digests[rank] for rank in row}) > 1 for row in alike):
            raise InputError(
                "distribute: the processes were called with different batches; every process of a replica works on the whole "
                "batch, so seed all alike and leave out DistributedSampler and loaders that split batches over processes"
            )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True, prepend=True)


def digest(inputs: Any) -> bytes:
    """Computes a few bytes that distinguish batches."""
    seen = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            seen.update(bytes_of(leaf))
    return seen.digest()


def bytes_of(value: torch.Tensor) -> bytes:
    """Returns shape, dtype and elements of a tensor; of one without values the first two."""
    described, flat = repr((tuple(value.shape), value.dtype)).encode(), value.detach().flatten()
    return described if value.is_meta else described + flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def gather_objects(own: Any) -> list[Any]:
    """Gathers one object of every rank, in order, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's object on every rank; the others' are ignored.

    Rank 0 may work for longer before it calls this than the timeout of the default group.
    """
    values = [value]
    dist.broadcast_object_list(values, 0, _patient(dist.group.WORLD))
    return values[0]


@lru_cache(maxsize=1)
def _patient(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes a group of all processes with a long timeout."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE_S))


def one_line(error: BaseException, limit: int = 200) -> str:
    """Returns the first line of a torch.distributed error, without its stack of native frames."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) <= limit else text[: limit - 3] + "..."
