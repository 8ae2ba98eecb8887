"""`StepTimeline`: a simulated step as all pages draw it, of a placement or of a whole strategy, whose blocks are the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.links import Device
from rlplace.cost.lifetimes import lifetimes
from rlplace.explanation.report.lanes import Lanes, lanes_of
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import PHASES, Problem
from rlplace.simulator import Timeline
from rlplace.simulator.simulated_plan import SimulatedPlan
from rlplace.simulator.timeline import resident_by_device


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes in use on one device, a step function with P points.

    Attributes:
        time_s: float64 [P], ascending; several points may have the same time.
        in_use_bytes: int64 [P], from this point to the next one, resident and reserved bytes included.
    """

    time_s: NDArray[np.float64]
    in_use_bytes: NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        """The largest value."""
        return int(self.in_use_bytes.max())

    def thinned(self, points: int) -> MemoryCurve:
        """Returns a curve of at most `points` points (at least 8): first, lowest, highest and last one of every stretch."""
        count = len(self.time_s)
        if count <= points:
            return self
        buckets = max(1, points // 4 - 1)
        bucket = np.arange(count) * buckets // count
        sort = np.lexsort((self.in_use_bytes, bucket))
        first = np.flatnonzero(np.diff(bucket, prepend=-1))
        last = np.append(first[1:], count) - 1
        kept = np.unique(np.concatenate([first, last, sort[first], sort[last], [int(self.in_use_bytes.argmax())]]))
        return MemoryCurve(self.time_s[kept], self.in_use_bytes[kept])


def memory_curves(problem: Problem, plan: PlacementPlan, timeline: Timeline) -> list[MemoryCurve]:
    """Returns the memory of every device over the step; its maximum is the simulator's peak.

    Args:
        problem: The simulated problem.
        plan: A plan for it.
        timeline: Its timeline. When the step does not complete, the curves are the resident bytes.
    """
    resident = resident_by_device(problem, np.asarray(plan.device_of_group, dtype=np.int32)).tolist()
    if timeline.step_time_s is None:
        return [MemoryCurve(np.zeros(1), np.array([size])) for size in resident]
    life = lifetimes(problem, plan)
    curves = []
    for device, size in enumerate(resident):
        here = life.device[life.item] == device
        times = np.concatenate([[0.0], life.time_s[here], [timeline.step_time_s]])
        live = np.concatenate([[0], life.live_bytes(device)[here]])
        curves.append(MemoryCurve(times, size + np.append(live, live[-1])))
    return curves


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """A simulated step as pages draw it. Axes: D devices, G groups, N ops; the groups of a strategy are its blocks.

    Attributes:
        name: Name of the problem or model.
        source: Sources of the problem, for display.
        devices: D devices.
        op_names: N names.
        op_group: int32 [N], group of each op.
        op_phase: int [N], phase of each op, by `rlplace.problem.PHASES`.
        op_s: float64 [N], seconds of each op in one micro-batch, on its device; nan where it cannot run.
        group_names: G names.
        group_bytes: int64 [G], bytes that each group holds all the time.
        device_of_group: int32 [G], device of each group in the first replica.
        lanes: Boxes of everything that runs.
        memory: D curves of memory in use.
        resident_bytes: int64 [D], bytes in use all the time.
        peak_memory_bytes: int64 [D], largest bytes in use.
        busy_s: float64 [D], seconds of computing.
        step_time_s: Seconds of the step; None when it does not complete.
        samples: Samples of the step.
        feasible: It completes and fits.
        violations: Why it is not feasible.
        devices_used: Devices that run an op.
        ops_run: Ops that run, over all devices and micro-batches.
        tensors: Tensors between ops of one micro-batch.
        alike: Devices of the cluster by the device that represents them here; empty where each is here.
    """

    name: str
    source: Mapping[str, Any] | None
    devices: tuple[Device, ...]
    op_names: Sequence[str]
    op_group: NDArray[np.int32]
    op_phase: NDArray[np.integer[Any]]
    op_s: NDArray[np.float64]
    group_names: Sequence[str]
    group_bytes: NDArray[np.int64]
    device_of_group: NDArray[np.int32]
    lanes: Lanes
    memory: tuple[MemoryCurve, ...]
    resident_bytes: NDArray[np.int64]
    peak_memory_bytes: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    step_time_s: float | None
    samples: int
    feasible: bool
    violations: tuple[str, ...]
    devices_used: int
    ops_run: int
    tensors: int
    alike: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64 [D], devices of the cluster that each represents."""
        return np.array([len(own) for own in self.alike] or [1] * len(self.devices), dtype=np.int64)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a strategy's step; 1 for a placement."""
        return 1 + int(self.lanes.microbatch.max(initial=0))

    @cached_property
    def group_s(self) -> NDArray[np.float64]:
        """float64 [G], seconds that each group computes a step, all micro-batches added up."""
        spent: NDArray[np.float64] = np.zeros(len(self.group_names))
        runs = np.where(self.op_phase == PHASES.index("update"), 1, self.microbatches)
        np.add.at(spent, self.op_group, np.nan_to_num(self.op_s) * runs)
        return spent

    @property
    def sent_bytes(self) -> NDArray[np.int64]:
        """int64 [transfers], bytes of each transfer."""
        return self.lanes.size_bytes[self.lanes.size_bytes >= 0]


def placement_timeline(run: SimulatedPlan) -> StepTimeline:
    """Lays out a simulated placement; an infeasible one, too."""
    problem, plan, line = run.problem, run.plan, run.line
    return StepTimeline(
        name=problem.name,
        source=problem.source,
        devices=problem.devices,
        op_names=problem.op_names,
        op_group=problem.op_group,
        op_phase=problem.op_phase,
        op_s=problem.time_s[np.arange(problem.num_ops), plan.device_of_group[problem.op_group]],
        group_names=problem.group_names,
        group_bytes=problem.resident_bytes,
        device_of_group=plan.device_of_group,
        lanes=lanes_of(problem, line),
        memory=tuple(memory_curves(problem, plan, line)),
        resident_bytes=resident_by_device(problem, plan.device_of_group),
        peak_memory_bytes=line.peak_memory_bytes,
        busy_s=line.busy_s,
        step_time_s=line.step_time_s,
        samples=line.samples,
        feasible=line.feasible,
        violations=line.violations,
        devices_used=len(np.unique(line.device_of_op)),
        ops_run=len(line.start_s),
        tensors=problem.num_tensors,
    )
