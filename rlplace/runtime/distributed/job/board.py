"""What the processes of a job know of each other, kept in the job's store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlplace.runtime.distributed.groups import attempt

_STORE_S = 10.0


@dataclass(frozen=True)
class Member:
    """One process of the job, as it introduced itself.

    Attributes:
        rank: Its number.
        host: Name of its machine.
        machine: Where its process number means something: the boot and the process namespace; empty where unknown.
        pid: There.
        part: What it runs, such as "stage 1".
    """

    rank: int
    host: str
    machine: str
    pid: int
    part: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.part + ', ' if self.part else ''}host {self.host})"


class Board:
    """What the processes of a job know of each other, in the job's store; any thread may use it.

    Every call raises RuntimeError when the store is gone.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        base = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"rlplace/watch/{attempt()}", base)  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_S))

    def put(self, key: str, data: dict[str, Any]) -> None:
        """Leaves something for the others."""
        self._store.set(key, json.dumps(data))

    def look(self, key: str) -> dict[str, Any] | None:
        """What somebody left; None when nobody did."""
        if not self._store.check([key]):
            return None
        data: dict[str, Any] = json.loads(self._store.get(key))
        return data

    def forget(self, key: str) -> None:
        """Takes back what somebody left."""
        self._store.delete_key(key)

    def member(self, rank: int) -> Member:
        """Who a rank is."""
        facts = self.look(f"member/{rank}")
        if facts is None:
            return Member(rank, "unknown", "", -1, "")
        return Member(rank, facts["host"], facts["machine"], facts["pid"], facts["part"])

    def elect(self) -> bool:
        """Whether this process is the one that reports."""
        return bool(self._store.add("reporters", 1) == 1)
