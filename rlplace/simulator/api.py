"""`simulate`, `simulate_many` and `Simulator`: step time and peak memory of plans.

All three run the compiled executor; numba is imported by the first call, not by importing this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, whole_number
from rlplace.plan import PlacementPlan, check_plan
from rlplace.plan.plan import check_order
from rlplace.problem import Problem
from rlplace.simulator.records import check_devices, order_ranks, priority_ranks
from rlplace.simulator.reference import STUCK
from rlplace.simulator.timeline import Timeline, fixed_violations, memory_violations, placement_violations, timeline_of

if TYPE_CHECKING:
    from rlplace.simulator.lowering import Lowered


def default_priority(problem: Problem) -> NDArray[np.float64]:
    """Returns the bottom level of every op, the default priority; see `rlplace.simulator.reference.reference_priority`.

    Returns:
        float64 [N] seconds, read-only.
    """
    from rlplace.simulator import lowering

    return lowering.compiled_priority(problem)


def warm_up() -> None:
    """Compiles the executor, or loads it, so that no time limit pays for it."""
    from rlplace.problem.generate import random_problem

    problem = random_problem(1, 4, 2)
    simulate(problem, [0] * problem.num_groups)


def simulate(
    problem: Problem,
    plan: PlacementPlan | Sequence[int] | NDArray[Any],
    *,
    priority: Sequence[float] | NDArray[Any] | None = None,
    order: Sequence[Sequence[int]] | None = None,
) -> Timeline:
    """Simulates one training step.

    Args:
        problem: The priced problem.
        plan: A plan for `problem`, or just a device number per group, int [G]. What a plan says about priority and order holds
            unless the other arguments replace it.
        priority: float [N], higher starts first; default `default_priority`.
        order: Per device the exact sequence of its ops; excludes `priority`.

    Raises:
        InputError: The plan is for another problem, or an argument has the wrong shape.
    """
    from rlplace.simulator import fast, records
    from rlplace.simulator.lowering import lower

    if isinstance(plan, PlacementPlan):
        check_plan(plan, problem)
        devices = np.array(plan.device_of_group, dtype=np.int32, order="C")
        if priority is None and order is None:
            priority, order = plan.priority, plan.order
    else:
        devices = check_devices(plan, (problem.num_groups,), problem)
    if order is not None and priority is not None:
        raise InputError("simulate: order excludes priority; give one of them")
    lowered = lower(problem)
    position = np.zeros(0, dtype=np.uint32)
    if order is not None:
        check_order(order, devices, problem)
        ranks, position = order_ranks(order, problem.num_ops)
    else:
        ranks = priority_ranks(problem, lowered, priority)
    results = _results(1, problem.num_devices)
    outcome, step, peak, busy = results
    work = lowered.take_work(timeline=True)
    fast.simulate_plans(tuple(lowered.graph), tuple(work), ranks, position, devices[None].view(np.uint32), results)
    moved = fixed_violations(problem, devices)
    if outcome[0] != fast.DONE:
        reasons = placement_violations(problem, devices) or [STUCK]
        line = timeline_of(problem, devices, reasons + moved)
    else:
        line = timeline_of(
            problem, devices, memory_violations(problem, peak[0]) + moved, step_time_s=float(step[0]),
            peak_memory_bytes=peak[0], busy_s=busy[0], times_s=work.time_s,
            transfers=work.transfer[: work.layout[records.TRANSFERS]],
        )  # fmt: skip
    lowered.give_work(work, timeline=True)
    return line


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


def simulate_many(
    problem: Problem,
    device_of_group: Sequence[Sequence[int]] | NDArray[Any],
    *,
    priority: Sequence[float] | NDArray[Any] | None = None,
    threads: int = 1,
) -> TimelineBatch:
    """Simulates K plans of one problem.

    Args:
        problem: The priced problem.
        device_of_group: int [K, G].
        priority: float [N], for all plans; default `default_priority`.
        threads: Threads to spread the plans over.
    """
    from rlplace.simulator import fast
    from rlplace.simulator.lowering import lower

    devices = check_devices(device_of_group, (-1, problem.num_groups), problem)
    whole_number(threads, "simulate_many: threads", 1)
    count = len(devices)
    results = _results(count, problem.num_devices)
    lowered = lower(problem)
    ranks = priority_ranks(problem, lowered, priority)

    def run(first: int, end: int) -> None:
        work = lowered.take_work()
        rows = tuple(array[first:end] for array in results)
        fast.simulate_plans(*_arguments(lowered, ranks, work, devices[first:end], rows))
        lowered.give_work(work)

    bounds = np.linspace(0, count, min(threads, max(1, count)) + 1).astype(int).tolist()
    if len(bounds) == 2:
        run(0, count)
    else:
        with ThreadPoolExecutor(len(bounds) - 1) as pool:
            list(pool.map(run, bounds[:-1], bounds[1:]))
    outcome, step, peak, busy = results
    limit, fixed = lowered.graph.bytes[-problem.num_devices :], problem.group_device
    fits = ((limit < 0) | (peak <= limit)).all(axis=1)
    at_home = ((fixed < 0) | (devices == fixed)).all(axis=1)
    return TimelineBatch(step, peak, busy, (outcome == fast.DONE) & fits & at_home)


class Simulator:
    """Repeated simulation of one problem with buffers of its own, for the inner loop of a search.

    Attributes:
        calls: Evaluations so far.
        work: State of the last evaluation, see `rlplace.simulator.records.Work`.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        priority: Sequence[float] | NDArray[Any] | None = None,
        timeline: bool = False,
    ) -> None:
        """Prepares.

        Args:
            problem: The priced problem.
            priority: float [N], higher starts first; default `default_priority`.
            timeline: Whether `work` records the times of ops and transfers, which takes a little longer.
        """
        from rlplace.simulator import fast
        from rlplace.simulator.lowering import lower

        self._lowered = lower(problem)
        self._ranks = priority_ranks(problem, self._lowered, priority)
        self.calls = 0
        self._problem, self._groups = problem, problem.num_groups
        self._devices = np.zeros((1, problem.num_groups), dtype=np.int32)
        self._row = self._devices[0]
        self.work = self._lowered.new_work(timeline=timeline)
        self._results = _results(1, problem.num_devices)
        self._outcome = self._results[0]
        self.peak_memory_bytes, self.busy_s = self._results[2][0], self._results[3][0]
        self._run, self._bad_device = fast.simulate_plans, fast.BAD_DEVICE
        self._arguments = _arguments(self._lowered, self._ranks, self.work, self._devices, self._results)

    @property
    def compiled(self) -> tuple[tuple[Any, ...], NDArray[np.int32]]:
        """For compiled loops: the arguments of `fast.simulate_plans`, and the int32 [G] that it then simulates."""
        return self._arguments, self._row

    def evaluate(self, device_of_group: Sequence[int] | NDArray[Any]) -> tuple[float, float]:
        """Returns step time and memory overflow of a plan.

        Does not check that fixed groups are on their device: respect `Problem.group_allowed`.

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
        step, overflow = self._run(*self._arguments)
        if self._outcome[0] == self._bad_device:
            raise InputError(f"device_of_group names a device outside 0..{len(self.busy_s) - 1}")
        return step, overflow

    def evaluate_many(self, device_of_group: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns `evaluate` for every row of an int array [K, G]: float64 [K] seconds, float64 [K] overflow."""
        from rlplace.simulator import fast

        devices = check_devices(device_of_group, (-1, self._groups), self._problem)
        self.calls += len(devices)
        outcome, step, peak, _ = results = _results(len(devices), len(self.busy_s))
        fast.simulate_plans(*_arguments(self._lowered, self._ranks, self.work, devices, results))
        limit = self._lowered.graph.bytes[-len(self.busy_s) :]
        overflow = np.zeros(len(devices))
        for device in np.flatnonzero(limit >= 0):  # one after the other, as the compiled code adds up
            overflow += np.maximum(peak[:, device] - limit[device], 0) / limit[device]
        return np.where(outcome == fast.DONE, step, np.inf), overflow


def _arguments(
    lowered: Lowered, ranks: NDArray[np.uint32], work: Any, devices: NDArray[np.int32], results: tuple[NDArray[Any], ...]
) -> tuple[Any, ...]:
    """Returns the arguments of `fast.simulate_plans` for the rows of `devices`."""
    none = np.zeros(0, dtype=np.uint32)
    return (tuple(lowered.graph), tuple(work), ranks, none, devices.view(np.uint32), results)


def _results(rows: int, devices: int) -> tuple[NDArray[Any], ...]:
    """Returns arrays for outcome, step time, peak memory and busy seconds of some plans."""
    return np.zeros(rows, dtype=np.int8), np.zeros(rows), np.zeros((rows, devices), dtype=np.int64), np.zeros((rows, devices))
