"""Run-time scheduling assistants, simulated: idle devices take queued ops from busy ones when costs drift from the plan.

The idea of hardware that helps the compiler to adjust the split at run time is of Tavarageri, Sridharan, Kaul, "Automatic Model
Parallelism for Deep Neural Networks with Compiler and Hardware Support", arXiv 1906.08168, 2019. Of that paper only the
abstract was at hand; the rules below are a reconstruction, not the paper's.

The step runs under the rules of `rlplace.simulator.reference`, at actual times. Each device has an assistant, which knows what
a device can know: the plan and its compile-time timeline, what is queued where, what has ended, what runs and since when, and
which transfers are under way. It never sees an actual time before the task has ended. Transfers take what was planned.

1. An idle device looks for an op that is movable, queued (ready) on a busy device and not moved before, among the first 16 of
   each queue. It takes the one of largest gain, if that is above a margin: when the op's results are expected where they are
   read, if it stays (planned rest of the running task, planned times of what is queued before it, its own), minus the same if
   it moves (transfers of its inputs, behind those that wait for the same channels, and its planned time there).
2. The backward ops of the op's group that read one of its inputs or outputs (what the forward op saved) follow it. What the
   move adds to transfers counts twice then, because gradients take the same ways. A backward op may be taken by itself; it
   pays for what was saved like for any other input.
3. A device takes nothing that leaves it with more planned work than the other device keeps.
4. With `only_late`, only ops that are expected to start later than planned are taken, by more than the margin. At planned times
   no op ever is: all that is queued before it has a higher priority and ran before it in the plan, too.
5. It takes an op only if its device's planned peak, or the peak so far where that is higher, leaves room for everything that
   moved ops bring along: inputs, outputs, temporaries, weights and gradients. Bytes of a move count for the rest of the step.
6. The owner of parameters is the group's planned device. Ops of such groups only move with `move_weights`: the weights are sent
   whenever the new device does not have them, the gradient is sent back for the update, which stays. Groups whose parameters
   other groups read, fixed groups, updates and collectives never move, and devices without a link to some other take nothing.
7. Results stay where they are made; readers elsewhere, on the old device too, get them by ordinary transfers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.compiler.assist_rule import AssistedRun, Steal
from rlplace.errors import InputError
from rlplace.plan import PlacementPlan, check_plan
from rlplace.problem import Problem
from rlplace.simulator.records import TRANSFER, check_devices, check_priority
from rlplace.simulator.reference import reference_priority
from rlplace.simulator.timeline import Timeline, fixed_violations, memory_violations, placement_violations, timeline_of


@dataclass(frozen=True, eq=False)
class AssistedTimeline:
    """The timeline of an assisted step.

    Attributes:
        timeline: With the devices that ran the ops; transfers of weights are not in it.
        steals: Decisions in order of time.
        weight_transfers: (group, source, destination, start in seconds, end in seconds) of weights that went along.
    """

    timeline: Timeline
    steals: tuple[Steal, ...]
    weight_transfers: tuple[tuple[int, int, int, float, float], ...]

    @property
    def step_time_s(self) -> float | None:
        """End of the last event; None when the step cannot complete."""
        return self.timeline.step_time_s


def simulate_assisted(
    problem: Problem,
    plan: PlacementPlan | Sequence[int] | NDArray[Any],
    *,
    movable: Sequence[bool] | NDArray[Any],
    margin_s: float | None = None,
    actual_time_s: NDArray[Any] | None = None,
    move_weights: bool = False,
    only_late: bool = True,
    priority: Sequence[float] | NDArray[Any] | None = None,
) -> AssistedTimeline:
    """Simulates one step with scheduling assistants.

    Without movable groups this is `rlplace.simulate` at the actual times, with the planned priorities.

    Args:
        problem: The priced graph; its times are what the plan and the assistants know.
        plan: A plan for `problem`, or a device number per group, int [G].
        movable: bool [G], groups whose ops may be taken.
        margin_s: Least gain that is worth a move; default the latency of the link from the op's device to the idle one.
        actual_time_s: float64 [N, D], what ops really take; default as planned.
        move_weights: Ops of groups with parameters may move too, and their weights and gradients are sent.
        only_late: Take only what is late, which leaves a step that goes as planned alone; False: whatever gains.
        priority: float [N], default the plan's or `default_priority`.

    Raises:
        InputError: An argument has the wrong shape, or the plan has an order.
    """
    if isinstance(plan, PlacementPlan):
        check_plan(plan, problem)
        if plan.order is not None:
            raise InputError("simulate_assisted: the plan has an order; assistants need plain plans, give its device_of_group")
        priority = plan.priority if priority is None else priority
        plan = plan.device_of_group
    devices = check_devices(plan, (problem.num_groups,), problem)
    may_move = np.asarray(movable)
    if may_move.shape != (problem.num_groups,) or may_move.dtype != np.bool_:
        raise InputError(f"simulate_assisted: movable must hold true or false for each of {problem.num_groups} groups")
    if margin_s is not None and not (math.isfinite(margin_s) and margin_s >= 0):
        raise InputError(f"simulate_assisted: margin_s must be a finite number from 0 up, found {margin_s}")
    key = reference_priority(problem) if priority is None else check_priority(priority, problem)
    actual = problem if actual_time_s is None else _with_times(problem, actual_time_s)
    moved = fixed_violations(problem, devices)
    violations = placement_violations(problem, devices)
    if violations:
        return AssistedTimeline(timeline_of(problem, devices, violations + moved), (), ())
    run = AssistedRun(problem, actual, devices, key, may_move, margin_s, move_weights, only_late)
    run.run()
    peak = np.array(run.peak, dtype=np.int64)
    violations = memory_violations(problem, peak) + moved
    transfers = np.array(run.transfers, dtype=TRANSFER)
    ordinary = transfers["value"] < problem.num_tensors
    timeline = timeline_of(
        problem, devices, violations, step_time_s=run.now, peak_memory_bytes=peak, busy_s=np.array(run.busy),
        times_s=np.array([run.start, run.end]), transfers=transfers[ordinary],
    )  # fmt: skip
    timeline = dataclasses.replace(timeline, device_of_op=np.array(run.device, dtype=np.int32))
    weights = tuple(
        (run.weight_group[value], source, destination, start_s, end_s)
        for start_s, end_s, value, source, destination in transfers[~ordinary].tolist()
    )
    return AssistedTimeline(timeline, tuple(run.steals), weights)


def _with_times(problem: Problem, actual_time_s: NDArray[Any]) -> Problem:
    times = np.array(actual_time_s, dtype=np.float64)
    if times.shape != problem.time_s.shape or (np.isnan(times) != np.isnan(problem.time_s)).any():
        raise InputError(
            f"simulate_assisted: actual_time_s must be {problem.num_ops} x {problem.num_devices} seconds, null where the "
            "problem's time_s is"
        )
    return dataclasses.replace(problem, time_s=times)
