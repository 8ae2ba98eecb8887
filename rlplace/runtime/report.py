"""What `apply` did with a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class ApplyReport:
    """Where a module runs its plan.

    Attributes:
        devices: The devices, by the plan's device index.
        device_of_module: Device index by path, where most ops of a module run.
        parameter_bytes: Bytes of parameters and buffers on each device.
        ops: Ops that the plan places.
        copies_per_forward: Copies between devices in one forward pass.
        loss_device: Where the plan puts the loss function it was captured with; None when the module computes its own loss.
        notes: What was approximated, in sentences.
    """

    devices: tuple[str, ...]
    device_of_module: Mapping[str, int]
    parameter_bytes: tuple[int, ...]
    ops: int
    copies_per_forward: int
    loss_device: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        copies = f"{self.copies_per_forward} copies between devices per forward pass"
        return "\n".join([f"{self.ops} ops on {', '.join(self.devices)}, {copies}", *self.notes])
