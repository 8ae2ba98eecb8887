"""Times the links of a cluster under torchrun: every ordered pair by send and receive, and collectives by group size.

Every pair and every group is timed alone while all other processes wait. A transfer is timed on its sender, from the send to
the receipt of an empty answer, less the time of such an answer (half the round trip of two empty messages), which
separates the two directions of a pair. A collective lasts until its slowest member is done. Medians over repeats after a
warm-up; the number of repeats shrinks where the time limit asks for it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from rlplace.cluster.fabric import CollectiveKind
from rlplace.cluster.machines import TIMED_COLLECTIVES, LinkTimes
from rlplace.errors import InputError, MissingError, RlplaceError
from rlplace.runtime.base.environment import own_device, time_run
from rlplace.runtime.base.ranks import end_group, gather_objects, one_line, start_group

PAIR_SIZES = {"cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24), "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)}
"""Bytes of the messages that a pair exchanges, by device type."""
GROUP_SIZES = {
    "cpu": (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 23, 1 << 25, 1 << 27, 1 << 29),
}
"""Bytes of the whole tensors of collectives, by device type."""
_WARMUP = 3
_TIMEOUT_S = 300


def measure_links(
    *, repeats: int = 25, time_limit_s: float = 120.0, progress: Callable[[str], None] | None = None
) -> LinkTimes | None:
    """Measures all links; every process of the torchrun job calls it.

    Args:
        repeats: Timed messages of each size, at least three.
        time_limit_s: Seconds of timing, roughly; start-up and warm-up come on top.
        progress: Called with the current measurement, on rank 0 alone.

    Returns:
        The times on rank 0, None on the others.

    Raises:
        MissingError: Not under torchrun, or no backend for the device.
        InputError: A single process, or more processes than devices on a host.
        RlplaceError: A process failed or could not be reached; names rank and host.
    """
    if any(name not in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")):
        raise MissingError(
            "measure --links runs under torchrun, one process per device: "
            "torchrun --nproc-per-node 2 -m rlplace measure --links --out c.toml"
        )
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise InputError("measure --links: one process has no links; start at least two (torchrun --nproc-per-node 2)")
    device = own_device(None, "measure --links")
    try:
        start_group("nccl" if device.type == "cuda" else "gloo", _TIMEOUT_S)
        say = progress if progress is not None and dist.get_rank() == 0 else lambda line: None
        times = _measure(_Bench(device, max(3, repeats)), time_limit_s, say)
        return times if dist.get_rank() == 0 else None
    except RlplaceError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise RlplaceError(f"rank {os.environ['RANK']} on {platform.node()}: {one_line(error)}") from error
    finally:
        end_group()


def _measure(bench: _Bench, time_limit_s: float, say: Callable[[str], None]) -> LinkTimes:
    facts = gather_objects({"host": platform.node() or "host", **_describe(bench.device)})
    hosts, world = tuple(str(fact["host"]) for fact in facts), len(facts)
    groups = group_ranks(hosts)
    members = [dist.new_group(list(ranks)) for ranks in groups]
    pair_bytes, group_bytes = PAIR_SIZES[bench.device.type], GROUP_SIZES[bench.device.type]
    pair_s = np.zeros((world, world, len(pair_bytes)))
    budget_s = 0.6 * time_limit_s / (world * (world - 1)) / (len(pair_bytes) + 1)
    for sender in range(world):
        say(f"pairs from device {sender} of {world}")
        for receiver in (rank for rank in range(world) if rank != sender):
            answer = bench.exchange(sender, receiver, 0, budget_s) / 2
            sent = np.array([bench.exchange(sender, receiver, size, budget_s) for size in pair_bytes])
            pair_s[sender, receiver] = np.maximum(sent - answer, 0.25 * sent)
    group_s = np.zeros((len(TIMED_COLLECTIVES), len(groups), len(group_bytes)))
    budget_s = 0.4 * time_limit_s / group_s.size
    for number, (ranks, group) in enumerate(zip(groups, members, strict=True)):
        say(f"collectives over {len(ranks)} devices of {' and '.join(dict.fromkeys(hosts[rank] for rank in ranks))}")
        for row, kind in zip(group_s[:, number], TIMED_COLLECTIVES, strict=True):
            row[:] = [bench.collective(kind, ranks, group, size, budget_s) for size in group_bytes]
    return LinkTimes(
        backend=str(dist.get_backend()),
        hosts=hosts,
        drivers=tuple(str(fact["driver"]) for fact in facts),
        memory_bytes=tuple(int(fact["memory_bytes"]) for fact in facts),
        cores=tuple(int(fact["cores"]) for fact in facts),
        pair_bytes=pair_bytes,
        pair_s=pair_s,
        groups=groups,
        group_bytes=group_bytes,
        group_s=group_s,
    )


class _Bench:
    """Timed exchanges; every rank of the job makes the same calls and gets the same seconds."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.rank, self.device, self.repeats = dist.get_rank(), device, repeats
        largest = max(*PAIR_SIZES[device.type], *GROUP_SIZES[device.type])
        self.buffer = torch.ones(largest // 4, dtype=torch.float32, device=device)
        self.empty = torch.zeros(1, dtype=torch.float32, device=device)

    def exchange(self, sender: int, receiver: int, size_bytes: int, budget_s: float) -> float:
        """Returns seconds from the send of a message, here an empty one for 0 bytes, to its empty answer."""
        message = self.buffer[: size_bytes // 4] if size_bytes else self.empty
        first, second = (dist.send, dist.recv) if self.rank == sender else (dist.recv, dist.send)
        other = receiver if self.rank == sender else sender

        def once() -> None:
            first(message, other)
            second(self.empty, other)

        return self._median(once if self.rank in (sender, receiver) else None, (sender,), budget_s)

    def collective(
        self, kind: CollectiveKind, ranks: Sequence[int], group: dist.ProcessGroup, size_bytes: int, budget_s: float
    ) -> float:
        """Returns seconds until the slowest member of a group is done with a tensor of so many bytes in all."""
        share = size_bytes // 4 // len(ranks)
        whole = self.buffer[: share * len(ranks)].clone() if self.rank in ranks else self.empty
        part = self.buffer[:share].clone()
        into = torch.empty_like(whole) if kind == "all_to_all" else self.empty

        def once() -> None:
            if kind == "all_reduce":
                dist.all_reduce(whole, group=group)
            elif kind == "all_gather":
                dist.all_gather_into_tensor(whole, part, group=group)
            elif kind == "reduce_scatter":
                dist.reduce_scatter_tensor(part, whole, group=group)
            else:
                dist.all_to_all_single(into, whole, group=group)

        return self._median(once if self.rank in ranks else None, ranks, budget_s, group)

    def _median(
        self, once: Callable[[], None] | None, clocks: Sequence[int], budget_s: float, group: dist.ProcessGroup | None = None
    ) -> float:
        """Returns median over repeats of the largest time that the ranks of `clocks` see; the first of them decides how
        often.
        """
        warm = 0.0 if once is None else min(self._seconds(once, group) for _ in range(_WARMUP))
        affordable = int(min(self.repeats, max(3, budget_s / max(warm, 1e-9))))
        count = torch.tensor([affordable], device=self.device)
        dist.broadcast(count, clocks[0])
        samples = torch.zeros(int(count.item()), dtype=torch.float64, device=self.device)
        if once is not None:
            seconds = [self._seconds(once, group) for _ in samples]
            samples += torch.tensor(seconds).to(samples) if self.rank in clocks else 0.0
        dist.all_reduce(samples, op=dist.ReduceOp.MAX)
        return float(samples.median())

    def _seconds(self, once: Callable[[], None], group: dist.ProcessGroup | None) -> float:
        if group is not None:
            dist.all_reduce(self.empty, group=group)  # start together
        return time_run(once, self.device)


def group_ranks(hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns ranks of the groups to measure: of every host its first 2, 4, 8, ... devices and all of them; then all ranks.

    Hosts with one device each are measured together as the devices of one host are.
    """
    every = tuple(range(len(hosts)))
    by_host = [tuple(rank for rank in every if hosts[rank] == host) for host in dict.fromkeys(hosts)]
    groups = []
    for ranks in [every] if max(map(len, by_host)) == 1 else by_host:
        groups += [*(ranks[: 1 << power] for power in range(1, len(ranks).bit_length())), ranks]
    return tuple(dict.fromkeys(ranks for ranks in [*groups, every] if len(ranks) > 1))


def _describe(device: torch.device) -> dict[str, str | int]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"driver": properties.name, "memory_bytes": int(properties.total_memory), "cores": 0}
    from rlplace.cluster.machines import host_processor

    cores, memory = host_processor()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {"driver": "cpu", "memory_bytes": memory // processes, "cores": max(1, cores // processes)}
