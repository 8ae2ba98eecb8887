"""Transfers of values to other devices: messages between processes, and copies between the devices of one process.

Messages are contiguous, of the shape and dtype that the graph promises, matched by tags. Both sides take these from the graph
and never from the tensor: a kernel may return other strides than its shape rule says.

Copies overlap with compute: `start_copy` issues one as soon as its tensor is made, on streams of their own at both ends;
`finish` makes the reader's stream wait for it. Other devices than CUDA copy at `start_copy`. Torch waits with a copy for the
current streams of both devices, and lets both wait for it afterwards. So the copy runs while side streams are current on both:
the stream that computes on the source only has to finish the work issued before, and the one on the destination first waits
in `finish`. Autograd runs the backward of a copy on the same side streams and orders it after its gradient by itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from rlplace.errors import RlplaceError
from rlplace.runtime.base import activity
from rlplace.runtime.base.ranks import default_timeout_s, group_of
from rlplace.runtime.placement.joint_graph import lay_out

_connected: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups of directions that are connected already."""


@dataclass(frozen=True, eq=False)
class Message:
    """A transfer of a value between two devices of the plan."""

    value: fx.Node
    source: Any  # its device; None: somewhere in this process
    destination: int  # the device that reads it
    tag: int  # unique in the step, ascending in the order in which a source sends
    needed: int  # number of the first node that reads it there

    def __str__(self) -> str:
        return repr(str(self.value))


@dataclass(eq=False)
class Wire:
    """Point-to-point messages of one rank within one step.

    Messages from one rank to another have their own process group per direction: NCCL ignores tags and matches by order, and
    both sides issue the messages of a direction in the order in which the sender makes them.
    """

    rank: int  # number of this process
    device: torch.device  # where received values go
    messages: Mapping[int, Message]  # those sent and received, by tag
    _sent: list[tuple[Any, torch.Tensor, int]] = field(default_factory=list)

    def finish(self) -> None:
        """Waits until every message has been sent."""
        for work, _, destination in self._sent:
            with activity.waiting("rank {} to take a value", destination, source=destination):
                _wait(work)
        self._sent.clear()
        activity.mark(None)

    def connect(self) -> None:
        """Makes the groups of the directions that this rank is an end of, and their connections.

        Every rank makes its own in the same global order before the first message, so that no three of them wait for each other
        in a circle. NCCL connects two ranks when they first send and receive, and holds up the one that comes first.
        """
        if dist.get_backend() == "gloo":
            return
        pairs = {(message.source, message.destination) for message in self.messages.values()}
        for source, destination in sorted(pairs, key=lambda pair: (min(pair), max(pair), pair)):
            group = _group(source, destination)
            if group in _connected:
                continue
            _connected.add(group)
            nothing = torch.zeros(1, device=self.device)
            if source == self.rank:
                dist.send(nothing, destination, group=group)
            else:
                dist.recv(nothing, source, group=group)


def send(wire: Wire, value: torch.Tensor, tag: int) -> None:
    """Starts to send a value of the shape and dtype that the receiver expects; its memory is held until then."""
    message = wire.messages[tag]
    like, there = message.value.meta["val"], message.destination
    if value.shape != like.shape or value.dtype != like.dtype:
        raise RlplaceError(
            f"rank {wire.rank}: a value to be sent to rank {there} is {value.dtype}{list(value.shape)}, but tracing "
            f"promised {like.dtype}{list(like.shape)}; the model depends on values that tracing cannot see"
        )
    flat = value.detach().contiguous()
    wire._sent = [item for item in wire._sent if not item[0].is_completed()]
    try:
        work = dist.isend(flat, there, group=_group(wire.rank, there), tag=tag)
    except RuntimeError:  # the connection is gone
        activity.doing("rank {} to take a value", there, source=there)
        raise
    wire._sent.append((work, flat, there))


def post(wire: Wire, tag: int) -> tuple[Any, torch.Tensor, Message]:
    """Starts to receive a value; returns the argument of `arrive`."""
    message = wire.messages[tag]
    like, source = message.value.meta["val"], message.source
    value = torch.empty(like.shape, dtype=like.dtype, device=wire.device)
    try:
        work = dist.irecv(value, source, group=_group(source, wire.rank), tag=tag)
    except RuntimeError:
        activity.doing("{} from rank {}", message, source, source=source)
        raise
    return work, value, message


def arrive(wire: Wire, posted: tuple[Any, torch.Tensor, Message]) -> torch.Tensor:
    """Waits until a value has arrived."""
    work, value, message = posted
    with activity.waiting("{} from rank {}", message, message.source, source=message.source):
        _wait(work)
    return lay_out(value, message.value.meta["val"].stride())


def _wait(work: Any) -> None:
    work.wait(timedelta(seconds=default_timeout_s()))  # gloo's own is that of when the group was made


def _group(source: int, destination: int) -> dist.ProcessGroup | None:
    if dist.get_backend() == "gloo":
        return None
    return group_of((source, destination), "up" if source < destination else "down")


Moving = tuple[torch.Tensor, Any]
"""A tensor at its destination, and the event there once its values have arrived; None: they have."""


def start_copy(tensor: torch.Tensor, device: torch.device) -> Moving:
    """Issues the copy of a tensor to a device; `finish` gives its result."""
    if tensor.device == device or tensor.device.type != "cuda" or device.type != "cuda":
        return tensor.to(device), None
    source, destination = side_stream(tensor.device, device)
    source.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(source), torch.cuda.stream(destination):
        value = tensor.to(device, non_blocking=True)
        event = destination.record_event()
    # The allocator must not hand out the source's memory again before the copy has read it.
    tensor.record_stream(source)
    return value, event


def finish(moving: Moving) -> torch.Tensor:
    """Returns the copied tensor, for use on the current stream of its device."""
    value, event = moving
    if event is not None:
        stream = torch.cuda.current_stream(value.device)
        stream.wait_event(event)
        value.record_stream(stream)  # it was allocated for the side stream
    return value


@functools.cache
def side_stream(source: torch.device, destination: torch.device) -> tuple[Any, Any]:
    """Returns the streams at both ends that copies from one device to another use."""
    return torch.cuda.Stream(source), torch.cuda.Stream(destination)
