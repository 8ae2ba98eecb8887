"""Times the links of a cluster under torchrun: every ordered pair by send and receive, and all-reduce by group size.

Every pair and every group is timed alone while all other processes wait. A transfer is timed on its sender, from the send to
the receipt of an empty answer, less the time of such an answer (half the round trip of two empty messages), so that the two
directions of a pair are told apart. An all-reduce lasts until its slowest member is done. Medians over repeats after a
warm-up; the number of repeats shrinks where the time limit asks for it.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlplace.errors import InputError, MissingError, RlplaceError
from rlplace.runtime.distributed.ranks import gather_objects, one_line

PAIR_SIZES = {"cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24), "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)}
"""Bytes of the messages that a pair exchanges, by device type."""
GROUP_SIZES = {
    "cpu": (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 23, 1 << 25, 1 << 27, 1 << 29),
}
"""Bytes of the tensors that a group reduces, by device type."""
_EMPTY_BYTES = 4
_WARMUP = 3
_TIMEOUT_S = 300


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """What was measured.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``.
        hosts: Host name of each of W devices (ranks).
        drivers: Device name as the driver reports it; ``"cpu"`` for a process on the host's processor.
        memory_bytes: Memory of each device; a share of the host's for processes on processors.
        cores: Processor cores of each device, 0 for accelerators.
        pair_bytes: P message sizes.
        pair_s: float64 [W, W, P], seconds from sender to receiver; the diagonal is 0.
        groups: Ranks of each of G groups.
        group_bytes: S message sizes.
        group_s: float64 [G, S], seconds of an all-reduce.
    """

    backend: str
    hosts: tuple[str, ...]
    drivers: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    cores: tuple[int, ...]
    pair_bytes: tuple[int, ...]
    pair_s: NDArray[np.float64]
    groups: tuple[tuple[int, ...], ...]
    group_bytes: tuple[int, ...]
    group_s: NDArray[np.float64]


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))


def measure_links(
    *, repeats: int = 25, time_limit_s: float = 120.0, progress: Callable[[str], None] | None = None
) -> LinkTimes | None:
    """Measures all links; every process of the torchrun job calls it.

    Args:
        repeats: Timed messages of each size, at least three.
        time_limit_s: Seconds of timing, roughly; start-up and warm-up come on top.
        progress: Told what is being measured, on rank 0 alone.

    Returns:
        The times on rank 0, None on the others.

    Raises:
        MissingError: Not under torchrun, or no backend for the device.
        InputError: A single process, or more processes than devices on a host.
        RlplaceError: A process failed or could not be reached; names rank and host.
    """
    if not under_torchrun():
        raise MissingError(
            "measure --links runs under torchrun, one process per device: "
            "torchrun --nproc-per-node 2 -m rlplace measure --links --out c.toml"
        )
    rank, local, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if world < 2:
        raise InputError("measure --links: one process has no links; start at least two (torchrun --nproc-per-node 2)")
    device, backend = _device(local)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=_TIMEOUT_S))
        say = progress if progress is not None and rank == 0 else _silent
        return _Session(rank, world, device, backend, repeats, time_limit_s, say).run()
    except RlplaceError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise RlplaceError(f"rank {rank} on {platform.node()}: {one_line(error)}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _silent(line: str) -> None:
    """Ranks above 0 say nothing."""


def _device(local: int) -> tuple[torch.device, str]:
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        if local >= torch.cuda.device_count():
            raise InputError(
                f"measure --links: process {local} of {platform.node()} has no device of its own; "
                f"start --nproc-per-node {torch.cuda.device_count()}"
            )
        if not dist.is_nccl_available():
            raise MissingError("measure --links: this torch has no nccl backend; install a CUDA build of torch")
        torch.cuda.set_device(local)
        return torch.device("cuda", local), "nccl"
    return torch.device("cpu"), "gloo"


class _Session:
    """One measurement on one rank."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        backend: str,
        repeats: int,
        time_limit_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.rank, self.world, self.device, self.backend = rank, world, device, backend
        self.repeats, self.time_limit_s, self.say = max(3, repeats), time_limit_s, say
        self.pair_bytes, self.group_bytes = PAIR_SIZES[device.type], GROUP_SIZES[device.type]
        largest = max(*self.pair_bytes, *self.group_bytes)
        self.buffer = torch.ones(largest // 4, dtype=torch.float32, device=device)
        self.empty = torch.zeros(_EMPTY_BYTES // 4, dtype=torch.float32, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def run(self) -> LinkTimes | None:
        facts = gather_objects({"host": platform.node() or "host", **_describe(self.device)})
        hosts = tuple(str(fact["host"]) for fact in facts)
        groups = group_ranks(hosts)
        members = [dist.new_group(list(ranks)) for ranks in groups]
        pair_s = self.pairs()
        group_s = np.zeros((len(groups), len(self.group_bytes)))
        for number, (ranks, group) in enumerate(zip(groups, members, strict=True)):
            self.say(f"all-reduce over {len(ranks)} devices of {'all hosts' if len(set(hosts)) > 1 else hosts[ranks[0]]}")
            dist.barrier()
            budget = 0.4 * self.time_limit_s / len(groups) / len(self.group_bytes)
            for size_number, size in enumerate(self.group_bytes):
                group_s[number, size_number] = self.all_reduce(ranks, group, size, budget)
        if self.rank != 0:
            return None
        shares = [sum(h == host and f["cores"] > 0 for h, f in zip(hosts, facts, strict=True)) or 1 for host in hosts]
        return LinkTimes(
            backend=self.backend,
            hosts=hosts,
            drivers=tuple(str(fact["driver"]) for fact in facts),
            memory_bytes=tuple(int(fact["memory_bytes"]) // share for fact, share in zip(facts, shares, strict=True)),
            cores=tuple(
                max(1, int(fact["cores"]) // share) if fact["cores"] else 0 for fact, share in zip(facts, shares, strict=True)
            ),
            pair_bytes=self.pair_bytes,
            pair_s=pair_s,
            groups=groups,
            group_bytes=self.group_bytes,
            group_s=group_s,
        )

    def pairs(self) -> NDArray[np.float64]:
        """float64 [W, W, P] on every rank."""
        times = torch.zeros(self.world, self.world, len(self.pair_bytes), dtype=torch.float64, device=self.device)
        budget = 0.6 * self.time_limit_s / (self.world * (self.world - 1)) / (len(self.pair_bytes) + 1)
        for sender in range(self.world):
            self.say(f"pairs from device {sender} of {self.world}")
            for receiver in range(self.world):
                if sender == receiver:
                    continue
                dist.barrier()
                if self.rank in (sender, receiver):
                    seconds = self.pair(sender, receiver, budget)
                    if self.rank == sender:
                        times[sender, receiver] = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times)
        return times.cpu().numpy()

    def pair(self, sender: int, receiver: int, budget_s: float) -> list[float]:
        """Seconds of a message of every size, as the sender sees it."""
        answer = self.exchange(sender, receiver, self.empty, budget_s) / 2
        times = [self.exchange(sender, receiver, self.buffer[: size // 4], budget_s) for size in self.pair_bytes]
        return [max(seconds - answer, 0.25 * seconds) for seconds in times]

    def exchange(self, sender: int, receiver: int, message: Tensor, budget_s: float) -> float:
        """Median seconds on the sender from the send to the answer."""
        other = receiver if self.rank == sender else sender

        def once() -> float:
            self.wait()
            begin = time.perf_counter()
            if self.rank == sender:
                dist.send(message, other)
                dist.recv(self.empty, other)
            else:
                dist.recv(message, other)
                dist.send(self.empty, other)
            self.wait()
            return time.perf_counter() - begin

        warm = min(once() for _ in range(_WARMUP))
        if self.rank == sender:  # the sender decides how often
            self.count.fill_(self.affordable(warm, budget_s))
            dist.send(self.count, other)
        else:
            dist.recv(self.count, other)
        return statistics.median(once() for _ in range(int(self.count.item())))

    def all_reduce(self, ranks: Sequence[int], group: dist.ProcessGroup, size: int, budget_s: float) -> float:
        """Median over repeats of the time until the slowest member is done; the same number on every rank of the job."""
        samples = torch.zeros(self.repeats, dtype=torch.float64, device=self.device)
        self.count.zero_()
        if self.rank in ranks:
            message = self.buffer[: size // 4].clone()

            def once() -> float:
                dist.all_reduce(self.empty, group=group)  # start together
                self.wait()
                begin = time.perf_counter()
                dist.all_reduce(message, group=group)
                self.wait()
                return time.perf_counter() - begin

            warm = min(once() for _ in range(_WARMUP))
            self.count.fill_(self.affordable(warm, budget_s))
            dist.broadcast(self.count, ranks[0], group=group)
            for repeat in range(int(self.count.item())):
                samples[repeat] = once()
        dist.all_reduce(samples, op=dist.ReduceOp.MAX)
        dist.all_reduce(self.count, op=dist.ReduceOp.MAX)
        return float(samples[: int(self.count.item())].median())

    def affordable(self, seconds: float, budget_s: float) -> int:
        return int(min(self.repeats, max(3, budget_s / max(seconds, 1e-9))))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def group_ranks(hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Ranks of the groups that are measured: on every host its first 2, 4, 8, ... devices and all of them; then everybody."""
    groups: list[tuple[int, ...]] = []
    for host in dict.fromkeys(hosts):
        ranks = tuple(rank for rank, name in enumerate(hosts) if name == host)
        size = 2
        while size < len(ranks):
            groups.append(ranks[:size])
            size *= 2
        if len(ranks) > 1:
            groups.append(ranks)
    if len(set(hosts)) > 1:
        groups.append(tuple(range(len(hosts))))
    return tuple(groups)


def _describe(device: torch.device) -> dict[str, str | int]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"driver": properties.name, "memory_bytes": int(properties.total_memory), "cores": 0}
    from rlplace.cluster.detect import host_processor

    cores, memory = host_processor()
    return {"driver": "cpu", "memory_bytes": memory, "cores": cores}
