"""`simulate`, `simulate_many` and `Simulator`: the ways to ask what a plan costs.

All three run the compiled executor; numba is imported by the first call, not by importing this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.plan import PlacementPlan, check_plan
from rlplace.plan.plan import check_order
from rlplace.problem import Problem
from rlplace.simulator.reference import STUCK_ORDER
from rlplace.simulator.tasks import task_graph
from rlplace.simulator.timeline import Timeline, fixed_violations, memory_violations, placement_violations, unfinished


def default_priority(problem: Problem) -> NDArray[np.float64]:
    """Bottom level of every op, the default priority; see `rlplace.simulator.reference.default_priority`.

    Returns:
        float64 [N] seconds, read-only.
    """
    from rlplace.simulator.lowering import lower

    return lower(problem).priority


def simulate(
    problem: Problem,
    plan: PlacementPlan | Sequence[int] | NDArray[Any],
    *,
    priority: Sequence[float] | NDArray[Any] | None = None,
    order: Sequence[Sequence[int]] | None = None,
) -> Timeline:
    """Simulates one training step.

    Args:
        problem: The priced graph.
        plan: A plan for `problem`, with its own priority or order, or just a device number per group, int [G].
        priority: float [N], higher starts first; default `default_priority`. Replaces what the plan says.
        order: Per device the exact sequence of its ops; excludes `priority`. Replaces what the plan says.

    Raises:
        InputError: The plan is for another problem or needs another executor, or an argument has the wrong shape.
    """
    from rlplace.simulator import fast
    from rlplace.simulator.lowering import lower

    if isinstance(plan, PlacementPlan):
        _check_supported(plan, problem)
        if priority is None and order is None:
            priority, order = plan.priority, plan.order
        devices = np.array(plan.device_of_group, dtype=np.int32, order="C")
    else:
        devices = _check_devices(plan, (problem.num_groups,), problem)
    device_of_op = devices[problem.op_group]
    tasks = task_graph(problem)
    lowered = lower(problem)
    if order is not None:
        if priority is not None:
            raise InputError("simulate: order excludes priority; give one of them")
        check_order(order, devices, problem)
        rank_of_op, op_of_rank = _order_ranks(order)
    else:
        rank_of_op, op_of_rank = _priority_ranks(problem, priority)
    outcome, step = np.zeros(1, dtype=np.int8), np.zeros(1)
    peak, busy = np.zeros((1, problem.num_devices), dtype=np.int64), np.zeros((1, problem.num_devices))
    work = lowered.take_work()
    _, _, count = fast.simulate_plans(
        tuple(lowered.graph), tuple(work), rank_of_op, op_of_rank, order is not None, devices[None], outcome, step, peak, busy
    )
    moved = fixed_violations(problem, devices)
    if outcome[0] != fast.DONE:
        reasons = [STUCK_ORDER] if outcome[0] == fast.STUCK else placement_violations(problem, devices)
        lowered.give_work(work)
        return unfinished(problem, devices, device_of_op, reasons + moved, tasks)
    slots = work.transfer_slot[:count]
    tensors = lowered.graph.edge_tensor[slots]
    violations = memory_violations(problem, peak[0]) + moved
    line = Timeline(
        step_time_s=float(step[0]),
        feasible=not violations,
        violations=tuple(violations),
        peak_memory_bytes=peak[0],
        busy_s=busy[0],
        device_of_op=device_of_op,
        start_s=work.start_s.copy(),
        end_s=work.end_s.copy(),
        transfer_tensor=tensors,
        transfer_source=work.source[tensors],
        transfer_destination=work.copy_device[slots],
        transfer_start_s=work.transfer_start_s[:count].copy(),
        transfer_end_s=work.transfer_end_s[:count].copy(),
        microbatches=1,
        samples=problem.samples_per_microbatch,
        task_op=tasks.op,
        task_microbatch=tasks.microbatch,
        transfer_microbatch=tasks.value_microbatch[tensors],
    )
    lowered.give_work(work)
    return line


@dataclass(frozen=True)
class PlanResult:
    """One plan of a `TimelineBatch`; the fields are those of `Timeline`."""

    step_time_s: float | None
    peak_memory_bytes: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    feasible: bool


@dataclass(frozen=True, eq=False)
class TimelineBatch:
    """Results of K simulations.

    Attributes:
        step_time_s: float64 [K], NaN where the step cannot complete.
        peak_memory_bytes: int64 [K, D].
        busy_s: float64 [K, D].
        feasible: bool [K].
    """

    step_time_s: NDArray[np.float64]
    peak_memory_bytes: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    feasible: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.step_time_s)

    def __getitem__(self, index: int) -> PlanResult:
        step = float(self.step_time_s[index])
        return PlanResult(
            step_time_s=None if step != step else step,
            peak_memory_bytes=self.peak_memory_bytes[index],
            busy_s=self.busy_s[index],
            feasible=bool(self.feasible[index]),
        )


def simulate_many(
    problem: Problem,
    device_of_group: Sequence[Sequence[int]] | NDArray[Any],
    *,
    priority: Sequence[float] | NDArray[Any] | None = None,
) -> TimelineBatch:
    """Simulates K plans of one problem.

    Args:
        problem: The priced graph.
        device_of_group: int [K, G].
        priority: float [N], for all of them; default `default_priority`.
    """
    from rlplace.simulator import fast
    from rlplace.simulator.lowering import lower

    devices = _check_devices(device_of_group, (-1, problem.num_groups), problem)
    rank_of_op, op_of_rank = _priority_ranks(problem, priority)
    count = len(devices)
    outcome, step = np.zeros(count, dtype=np.int8), np.zeros(count)
    peak, busy = np.zeros((count, problem.num_devices), dtype=np.int64), np.zeros((count, problem.num_devices))
    lowered = lower(problem)
    work = lowered.take_work()
    fast.simulate_plans(tuple(lowered.graph), tuple(work), rank_of_op, op_of_rank, False, devices, outcome, step, peak, busy)
    lowered.give_work(work)
    limit, fixed = lowered.graph.limit_bytes, problem.group_device
    fits = ((limit < 0) | (peak <= limit)).all(axis=1)
    at_home = ((fixed < 0) | (devices == fixed)).all(axis=1)
    return TimelineBatch(step, peak, busy, (outcome == fast.DONE) & fits & at_home)


class Simulator:
    """Repeated simulation of one problem with buffers of its own, for the inner loop of a search.

    Attributes:
        calls: Evaluations so far.
    """

    def __init__(self, problem: Problem, *, priority: Sequence[float] | NDArray[Any] | None = None) -> None:
        from rlplace.simulator import fast
        from rlplace.simulator.lowering import lower

        lowered = lower(problem)
        self.calls = 0
        self._groups = problem.num_groups
        self._devices = np.zeros((1, problem.num_groups), dtype=np.int32)
        self._row = self._devices[0]
        self._outcome = np.zeros(1, dtype=np.int8)
        peak, busy = np.zeros((1, problem.num_devices), dtype=np.int64), np.zeros((1, problem.num_devices))
        self.peak_memory_bytes, self.busy_s = peak[0], busy[0]
        rank_of_op, op_of_rank = _priority_ranks(problem, priority)
        self._run = fast.simulate_plans
        self._arguments = (
            tuple(lowered.graph), tuple(lowered.new_work()), rank_of_op, op_of_rank, False,
            self._devices, self._outcome, np.zeros(1), peak, busy,
        )  # fmt: skip

    def evaluate(self, device_of_group: Sequence[int] | NDArray[Any]) -> tuple[float, float]:
        """Step time and memory overflow of a plan.

        Whether fixed groups sit on their device is not looked at: respect `Problem.group_allowed`.

        Args:
            device_of_group: int [G].

        Returns:
            Seconds, inf when the step cannot complete; and the sum over devices of max(0, peak - limit) / limit, 0 when
            every peak fits. `peak_memory_bytes` and `busy_s` then hold the details, int64 and float64 [D], until the next
            call.
        """
        if len(device_of_group) != self._groups:
            raise InputError(f"device_of_group has {len(device_of_group)} entries, the problem {self._groups} groups")
        self.calls += 1
        self._row[:] = device_of_group
        step, overflow, _ = self._run(*self._arguments)
        if self._outcome[0] == 3:
            raise InputError(f"device_of_group names a device outside 0..{len(self.busy_s) - 1}")
        return step, overflow


def _check_supported(plan: PlacementPlan, problem: Problem) -> None:
    check_plan(plan, problem)
    one_step = "this version simulates one micro-batch with the list schedule on one replica"
    if plan.microbatches != 1:
        raise InputError(f"plan: {plan.microbatches} microbatches; {one_step}")
    if plan.schedule != "list":
        raise InputError(f"plan: schedule {plan.schedule!r}; {one_step}")
    if plan.replicas is not None and [list(row) for row in plan.replicas] != [list(range(problem.num_devices))]:
        raise InputError(f"plan: replicas other than the plan's own devices; {one_step}")
    if any(parts != 1 for dims in (plan.shards or {}).values() for parts in dims.values()):
        raise InputError(f"plan: sharded ops; {one_step}")


def _check_devices(value: Any, shape: tuple[int, ...], problem: Problem) -> NDArray[np.int32]:
    """A contiguous int32 copy of one or several plans, -1 in `shape` standing for any length."""
    try:
        devices = np.asarray(value)
    except ValueError:
        raise InputError("device_of_group: expected rows of equal length") from None
    if devices.size == 0 and devices.ndim == len(shape):
        devices = devices.astype(np.int32)
    fits = devices.ndim == len(shape) and all(want in (-1, found) for want, found in zip(shape, devices.shape, strict=True))
    if not fits:
        wanted = " x ".join("K" if n < 0 else str(n) for n in shape)
        raise InputError(f"device_of_group: expected {wanted} device numbers, found shape {devices.shape}")
    if devices.dtype.kind not in "iu":
        raise InputError(f"device_of_group: expected whole numbers, found {devices.dtype}")
    if devices.size and (devices.min() < 0 or devices.max() >= problem.num_devices):
        raise InputError(f"device_of_group names a device outside 0..{problem.num_devices - 1}")
    return np.array(devices, dtype=np.int32, order="C")


def _priority_ranks(
    problem: Problem, priority: Sequence[float] | NDArray[Any] | None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    from rlplace.simulator.lowering import lower, ranks

    if priority is None:
        lowered = lower(problem)
        return lowered.rank_of_op, lowered.op_of_rank
    values = np.asarray(priority, dtype=np.float64)
    if values.shape != (problem.num_ops,):
        raise InputError(f"priority: expected {problem.num_ops} numbers, found shape {values.shape}")
    if not np.isfinite(values).all():
        raise InputError("priority: every number must be finite")
    return ranks(values)


def _order_ranks(order: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    op_of_rank = np.array([op for row in order for op in row], dtype=np.int32)
    rank_of_op = np.empty_like(op_of_rank)
    rank_of_op[op_of_rank] = np.arange(len(op_of_rank), dtype=np.int32)
    return rank_of_op, op_of_rank
