"""Values on their way between processes: contiguous, of the shape and dtype that the graph promises, matched by tags.

Both sides go by the graph and never by the tensor at hand: a kernel may return other strides than its shape rule says.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlplace.errors import RlplaceError
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.ranks import default_timeout_s, group_of, one_line

_connected: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups of directions over which something has gone already."""


class LostPeerError(RlplaceError):
    """Another process did not send or take a value in time, or is gone.

    Attributes:
        peer: Its rank.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


@dataclass(frozen=True, eq=False)
class Arrival:
    """A value on its way to this process.

    Attributes:
        work: What torch waits with.
        rank: Number of this process.
        source: The rank that sends it.
        what: Whose text names the value in messages.
    """

    work: Any
    rank: int
    source: int
    what: object

    def wait(self) -> None:
        """Waits until it has arrived.

        Raises:
            LostPeerError: It will not.
        """
        before = activity.note()
        activity.doing("{} from rank {}", self.what, self.source, source=self.source)
        try:
            self.work.wait(timedelta(seconds=default_timeout_s()))  # gloo's own is that of when the group was made
        except RuntimeError as error:
            raise LostPeerError(
                f"rank {self.rank} waited for {self.what} from rank {self.source}, which is gone or hangs: {one_line(error)}",
                self.source,
            ) from error
        activity.doing(*before)


@dataclass(eq=False)
class Wire:
    """Point-to-point messages of one rank within one step.

    Messages from one rank to another have their own process group per direction: NCCL ignores tags and matches by order, and
    both sides issue the messages of a direction in the order in which the sender makes them.

    Attributes:
        rank: Number of this process.
        device: Where received values go.
    """

    rank: int
    device: torch.device
    _sent: list[tuple[Any, torch.Tensor, int]] = field(default_factory=list)

    def send(self, value: torch.Tensor, like: torch.Tensor, destination: int, tag: int) -> None:
        """Starts to send a value of the shape and dtype that the receiver expects; it is kept until it has gone."""
        if value.shape != like.shape or value.dtype != like.dtype:
            raise RlplaceError(
                f"rank {self.rank}: a value to be sent to rank {destination} is {value.dtype}{list(value.shape)}, but tracing "
                f"promised {like.dtype}{list(like.shape)}; the model depends on values that tracing cannot see"
            )
        flat = value.detach().contiguous()
        self._sent = [item for item in self._sent if not item[0].is_completed()]
        try:
            work = dist.isend(flat, destination, group=self._group(self.rank, destination), tag=tag)
        except RuntimeError as error:
            raise LostPeerError(
                f"rank {self.rank} cannot send to rank {destination}: {one_line(error)}", destination
            ) from error
        self._sent.append((work, flat, destination))

    def receive(self, like: torch.Tensor, source: int, tag: int, what: object) -> tuple[Arrival, torch.Tensor]:
        """Starts to receive; returns what to wait for and the tensor that it fills; the text of `what` names it."""
        value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        try:
            work = dist.irecv(value, source, group=self._group(source, self.rank), tag=tag)
        except RuntimeError as error:
            raise LostPeerError(
                f"rank {self.rank} cannot receive {what} from rank {source}: {one_line(error)}", source
            ) from error
        return Arrival(work, self.rank, source, what), value

    def finish(self) -> None:
        """Waits until everything that was sent has gone."""
        for work, _, destination in self._sent:
            activity.doing("rank {} to take a value", destination, source=destination)
            try:
                work.wait(timedelta(seconds=default_timeout_s()))
            except RuntimeError as error:
                raise LostPeerError(
                    f"rank {self.rank} waited for rank {destination} to take a value: {one_line(error)}", destination
                ) from error
        self._sent.clear()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Makes the groups of some directions that this rank is an end of, and their connections.

        Every rank makes its own in the same global order before the first message, so that no three of them wait for each other
        in a circle. NCCL connects two ranks when they first send and receive, and holds up the one that comes first.

        Args:
            pairs: Senders and receivers; both ends of a direction call this with it, the same number of times.
        """
        if dist.get_backend() == "gloo":
            return
        for source, destination in sorted(set(pairs), key=lambda pair: (min(pair), max(pair), pair)):
            group = self._group(source, destination)
            if group in _connected:
                continue
            _connected.add(group)
            nothing = torch.zeros(1, device=self.device)
            if source == self.rank:
                dist.send(nothing, destination, group=group)
            else:
                dist.recv(nothing, source, group=group)

    def _group(self, source: int, destination: int) -> dist.ProcessGroup | None:
        if dist.get_backend() == "gloo":
            return None
        return group_of((source, destination), "up" if source < destination else "down")
