"""Process groups, made when they are first needed and kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

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
        groups[key] = dist.new_group(list(key[0]), use_local_synchronization=True, timeout=_timeout())
    found: dist.ProcessGroup = groups[key]
    return found


def _timeout() -> Any:
    """The timeout of the default group, which other groups do not take over by themselves."""
    return dist.distributed_c10d._get_pg_config_timeout() if hasattr(dist.distributed_c10d, "_get_pg_config_timeout") else None


def reduce_scatter(output: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """Starts to add up equal parts of flat `rows`, one for each rank, into `output`; returns the work to wait for."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name from torch 2.13 on
    return scatter(output, rows, group=group, async_op=True)


def all_gather(rows: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Puts the flat parts of all ranks one after the other into flat `rows`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
    gather(rows, part, group=group)
