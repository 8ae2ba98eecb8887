"""What `apply` did with a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class ApplyReport:
    """How a module runs its plan.

    Attributes:
        level: ``"op"`` or ``"module"``.
        devices: The devices, by the plan's device index.
        why_not_op: Why the plan runs at module level; None when it runs at op level.
        device_of_module: Device index by path: at module level where each module runs its ops, at op level where most of its
            ops run.
        parameter_bytes: Bytes of parameters and buffers on each device.
        ops: Ops that the plan places.
        ops_moved: Ops that run on another device than the plan says.
        copies_per_forward: Copies between devices in one forward pass; the backward pass makes at most as many. At module level
            None before the first forward pass and counted in each.
        loss_device: Where the plan puts the loss function it was captured with; None when the module computes its own loss.
        notes: What was approximated, in sentences.
    """

    level: str
    devices: tuple[str, ...]
    why_not_op: str | None
    device_of_module: Mapping[str, int]
    parameter_bytes: tuple[int, ...]
    ops: int
    ops_moved: int
    copies_per_forward: int | None
    loss_device: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.level} level on {', '.join(self.devices)}"]
        lines += [f"not op level: {self.why_not_op}"] if self.why_not_op else []
        lines.append(f"{self.ops - self.ops_moved} of {self.ops} ops run where the plan says")
        if self.copies_per_forward is not None:
            lines.append(f"{self.copies_per_forward} copies between devices per forward pass")
        return "\n".join([*lines, *self.notes])
