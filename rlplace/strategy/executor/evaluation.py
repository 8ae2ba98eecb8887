"""What an executor says about a draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.cluster import Cluster

PARTS = ("compute", "tensor", "gather", "exchange", "hand_over", "bubble", "update")
"""Where the busiest place's step goes: ops; collectives inside blocks; waiting for parameters; waiting for gradients to be
exchanged, ties and compute slowed meanwhile included; waiting for what other stages send, as far as the way takes; waiting for
other stages; updates."""

EXECUTOR = "blocks"
"""Name of the block executor, who simulated a step, in predictions."""


def bytes_over(peak_bytes: Sequence[float], cluster: Cluster) -> float:
    """Bytes over capacity, summed over the devices of a cluster."""
    pairs = zip(peak_bytes, cluster.devices, strict=True)
    return sum(max(0.0, peak - float(device.memory_bytes or math.inf)) for peak, device in pairs)


@dataclass(frozen=True)
class Evaluation:
    """Step time and memory of a draft.

    Attributes:
        step_time_s: Seconds of a step.
        passes_s: Seconds until all gradients are exchanged; what follows are updates.
        feasible: Whether it ends, and every device has room.
        peak_memory_bytes: For each device of the cluster; 0 for those that the draft leaves out, else with what is reserved.
        host_bytes: For each host number from 0, what lives in its memory instead of on a device.
        over_bytes: Bytes over capacity, summed over devices.
        parts: Seconds by entry of `PARTS` on the place with most work; they add up to the step time. Of several pipelines it is
            a place of the slowest.
        bottleneck: The stage with most work on that place; stages of several pipelines count one after the other.
        stage_busy_s: For each stage its ops, collectives and exposed communication in a step, of the slowest lane.
        executor: Who says so: the block executor, or the op-level simulator.
    """

    step_time_s: float
    passes_s: float
    feasible: bool
    peak_memory_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    over_bytes: float
    parts: dict[str, float]
    bottleneck: int
    stage_busy_s: tuple[float, ...]
    executor: str = EXECUTOR
