"""The `Timeline` record: start and end times of one simulated step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.links import fullest_share
from rlplace.plan.prediction import Prediction
from rlplace.problem import Problem
from rlplace.simulator.records import TRANSFER

EXECUTOR = "list"
"""Name of the executor (`rlplace.simulator.reference`); every table states it."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Result of one simulation.

    Axes: D devices, N ops, X transfers in order of their start.

    Attributes:
        step_time_s: End of the last event; None when the step cannot complete (null time, missing link, stuck order).
        feasible: The step completes and no peak exceeds its device's memory.
        violations: One sentence per broken constraint; empty when feasible.
        peak_memory_bytes: int64 [D], with resident and reserved bytes. When the step cannot complete: those bytes alone.
        busy_s: float64 [D], time spent computing.
        device_of_op: int32 [N].
        start_s, end_s: float64 [N]; NaN when the step cannot complete.
        transfer_tensor, transfer_source, transfer_destination: int32 [X].
        transfer_start_s, transfer_end_s: float64 [X].
        samples: Samples that the step processes.
    """

    step_time_s: float | None
    feasible: bool
    violations: tuple[str, ...]
    peak_memory_bytes: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    device_of_op: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    transfer_tensor: NDArray[np.int32]
    transfer_source: NDArray[np.int32]
    transfer_destination: NDArray[np.int32]
    transfer_start_s: NDArray[np.float64]
    transfer_end_s: NDArray[np.float64]
    samples: int

    def predicted(self, problem: Problem) -> Prediction:
        """Returns the `predicted` entry of a plan file.

        ``compute``, ``transfer`` and ``idle`` are seconds summed over devices (over transfers for ``transfer``).
        """
        step = self.step_time_s
        busy = float(self.busy_s.sum())
        return Prediction(
            step_time_s=step,
            samples_per_s=self.samples / step if step else None,
            peak_memory_bytes=tuple(int(peak) for peak in self.peak_memory_bytes),
            fullest_share=fullest_share(self.peak_memory_bytes.tolist(), problem.devices),
            feasible=self.feasible,
            executor=EXECUTOR,
            compute=busy,
            transfer=float((self.transfer_end_s - self.transfer_start_s).sum()),
            idle=None if step is None else step * problem.num_devices - busy,
        )


def resident_by_device(problem: Problem, device_of_group: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns int64 [D], bytes in use for the whole step: reserved bytes and the resident bytes of the groups placed there."""
    total = np.array([device.reserved_bytes for device in problem.devices], dtype=np.int64)
    np.add.at(total, device_of_group, problem.resident_bytes)
    return total


def placement_violations(problem: Problem, device_of_group: NDArray[np.int32]) -> list[str]:
    """Returns reasons why the step cannot complete: ops without a time where they sit, and needed links that do not exist."""
    device_of_op = device_of_group[problem.op_group]
    broken = []
    null = np.isnan(problem.time_s[np.arange(problem.num_ops), device_of_op])
    if null.any():
        op = int(np.flatnonzero(null)[0])
        broken.append(
            f"{int(null.sum())} ops sit where they cannot run, first {problem.op_names[op]!r} "
            f"on {problem.devices[device_of_op[op]].name}"
        )
    tensor = problem.edge_tensor
    producer, owner = problem.tensor_producer[tensor], problem.tensor_owner[tensor]
    source = np.where(producer >= 0, device_of_op[np.maximum(producer, 0)], device_of_group[np.maximum(owner, 0)])
    target = device_of_op[problem.consumers]
    unlinked = (source != target) & (problem.links.bandwidth_bytes_per_s[source, target] == 0.0)
    if unlinked.any():
        edge = int(np.flatnonzero(unlinked)[0])
        names = problem.devices[source[edge]].name, problem.devices[target[edge]].name
        broken.append(
            f"{int(unlinked.sum())} tensor edges need a link that does not exist, first from {names[0]} to {names[1]}"
        )
    return broken


def fixed_violations(problem: Problem, device_of_group: NDArray[np.int32]) -> list[str]:
    """Returns one sentence when groups that may only sit on one device sit on another; the step can be timed all the same."""
    moved = np.flatnonzero((problem.group_device >= 0) & (problem.group_device != device_of_group))
    if len(moved) == 0:
        return []
    name, device = problem.group_names[moved[0]], problem.devices[problem.group_device[moved[0]]].name
    return [f"{len(moved)} fixed groups sit elsewhere, first {name!r}, which may only sit on {device}"]


def memory_violations(problem: Problem, peak_memory_bytes: NDArray[np.int64]) -> list[str]:
    """Returns one sentence per device whose peak exceeds its memory."""
    return [
        f"{device.name} needs {int(peak)} bytes and has {device.memory_bytes}, {int(peak) - device.memory_bytes} short"
        for device, peak in zip(problem.devices, peak_memory_bytes, strict=True)
        if device.memory_bytes is not None and peak > device.memory_bytes
    ]


def timeline_of(
    problem: Problem,
    device_of_group: NDArray[np.int32],
    violations: list[str],
    *,
    step_time_s: float | None = None,
    peak_memory_bytes: NDArray[np.int64] | None = None,
    busy_s: NDArray[np.float64] | None = None,
    times_s: NDArray[np.float64] | None = None,
    transfers: NDArray[Any] | None = None,
) -> Timeline:
    """Returns the timeline of a step, by default of one that cannot complete.

    Args:
        problem: The problem.
        device_of_group: int32 [G].
        violations: One sentence per broken constraint.
        step_time_s: End of the last event.
        peak_memory_bytes: int64 [D].
        busy_s: float64 [D].
        times_s: float64 [2, N], start and end of every op.
        transfers: `TRANSFER` [X].
    """
    start_s, end_s = np.full((2, problem.num_ops), np.nan) if times_s is None else times_s
    transfers = np.zeros(0, dtype=TRANSFER) if transfers is None else transfers
    return Timeline(
        step_time_s=step_time_s,
        feasible=step_time_s is not None and not violations,
        violations=tuple(violations),
        peak_memory_bytes=resident_by_device(problem, device_of_group) if peak_memory_bytes is None else peak_memory_bytes,
        busy_s=np.zeros(problem.num_devices) if busy_s is None else busy_s,
        device_of_op=device_of_group[problem.op_group],
        start_s=start_s.copy(),
        end_s=end_s.copy(),
        transfer_tensor=transfers["value"].copy(),
        transfer_source=transfers["source"].copy(),
        transfer_destination=transfers["destination"].copy(),
        transfer_start_s=transfers["start_s"].copy(),
        transfer_end_s=transfers["end_s"].copy(),
        samples=problem.samples_per_microbatch,
    )
