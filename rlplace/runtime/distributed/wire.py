"""Values on their way between processes: contiguous, laid out by the graph's metadata, matched by tags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rlplace.errors import RlplaceError
from rlplace.runtime.distributed.groups import group_of
from rlplace.runtime.distributed.layouts import Layout


class LostPeerError(RlplaceError):
    """Another process did not send or take a value in time, or is gone."""


@dataclass(eq=False)
class Wire:
    """Point-to-point messages of one rank within one step.

    Messages from one rank to another have their own process group per direction: NCCL ignores tags and matches by order, and
    both sides issue the messages of a direction in the order in which the sender makes them.

    Attributes:
        rank: Of this process.
        device: Where received values go.
    """

    rank: int
    device: torch.device
    _sent: list[tuple[Any, torch.Tensor]] = field(default_factory=list)

    def send(self, value: torch.Tensor, layout: Layout, destination: int, tag: int) -> None:
        """Starts to send; the value is kept until it has gone."""
        if tuple(value.shape) != layout.shape or value.dtype != layout.dtype:
            raise RlplaceError(
                f"rank {self.rank}: a value to be sent to rank {destination} is {value.dtype}{list(value.shape)}, but tracing "
                f"promised {layout.dtype}{list(layout.shape)}; the model depends on values that tracing cannot see"
            )
        flat = value.detach().contiguous()
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        work = dist.isend(flat, destination, group=self._group(self.rank, destination), tag=tag)
        self._sent.append((work, flat))

    def receive(self, layout: Layout, source: int, tag: int) -> tuple[Any, torch.Tensor]:
        """Starts to receive; returns the work to wait for and the tensor that it fills."""
        value = layout.empty(self.device)
        return dist.irecv(value, source, group=self._group(source, self.rank), tag=tag), value

    def finish(self) -> None:
        """Waits until everything that was sent has gone."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _group(self, source: int, destination: int) -> dist.ProcessGroup | None:
        if dist.get_backend() == "gloo":
            return None
        return group_of((source, destination), "up" if source < destination else "down")
