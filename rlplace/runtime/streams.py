"""Copies between devices that overlap with compute.

`start_copy` issues a copy as soon as its tensor is made, on streams of their own at both ends; `finish` makes the reader's
stream wait for it. In between both devices go on computing. Other devices than CUDA copy at `start_copy`.

Torch waits with a copy for the current streams of both devices, and lets both wait for it afterwards. So the copy runs while
side streams are current on both: the stream that computes on the source is only asked for what it has issued before, and the
one on the destination first waits in `finish`. Autograd runs the backward of a copy on the same side streams and orders it
after its gradient by itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

Moving = tuple[torch.Tensor, Any]
"""A tensor at its destination, and what happens there once its numbers are there; None: they are."""


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
    """The copied tensor, for use on the current stream of its device."""
    value, event = moving
    if event is not None:
        stream = torch.cuda.current_stream(value.device)
        stream.wait_event(event)
        value.record_stream(stream)  # it was allocated for the side stream
    return value


@functools.cache
def side_stream(source: torch.device, destination: torch.device) -> tuple[Any, Any]:
    """The streams at both ends that copies from one device to another use."""
    return torch.cuda.Stream(source), torch.cuda.Stream(destination)
