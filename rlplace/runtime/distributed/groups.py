"""Process groups, made when they are first needed and kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

_made: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], str], Any]] = weakref.WeakKeyDictionary()


def group_of(ranks: Iterable[int], purpose: str = "") -> dist.ProcessGroup:
    """The process group of some ranks; only they call this, all of them in the same order of groups.

    Args:
        ranks: Global ranks.
        purpose: Groups of the same ranks for different purposes are different, so that their messages cannot be mixed up.
    """
    default = dist.group.WORLD
    key = (tuple(sorted(set(ranks))), purpose)
    groups = _made.setdefault(default, {})
    if key not in groups:
        timeout = timedelta(seconds=default_timeout_s())  # other groups do not take it over by themselves
        with _named(f"rlplace {attempt()} {key[1]} {key[0]}"):
            groups[key] = dist.new_group(list(key[0]), use_local_synchronization=True, timeout=timeout)
    group: dist.ProcessGroup = groups[key]
    return group


def connect_now(group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes the connections of a group, all members together.

    NCCL makes them in the first collective, and whoever comes first stands still there until the others come: in the middle of
    a step they may be waiting for it.
    """
    if dist.get_backend() != "gloo":
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def attempt() -> int:
    """How often torchrun has restarted the job: its store outlives that, with all that the attempt before left in it."""
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


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Gives a group that its members make by themselves a name that is the same on all of them.

    torch takes the number of groups that a process has made so far into the name, and the members wait for each other for ever
    when some of them are in more groups than others.
    """
    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: hashlib.blake2b(name.encode(), digest_size=20).hexdigest()
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


def default_timeout_s() -> float:
    """The timeout of the default group, which is where a program says how long is too long."""
    group = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else dist.distributed_c10d.default_pg_timeout.total_seconds()


def reduce_scatter(output: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """Starts to add up equal parts of flat `rows`, one for each rank, into `output`; returns the work to wait for."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name from torch 2.13 on
    return scatter(output, rows, group=group, async_op=True)


def all_gather(rows: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Puts the flat parts of all ranks one after the other into flat `rows`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
    gather(rows, part, group=group)
