"""What could have made the steps of a running plan slower or faster: corrections of the problem, one cause each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.measured.correction import Correction, corrected, no_correction
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator import Timeline, simulate

MOST_CAUSES = 12
_MOST = 64.0  # largest factor that is tried
_EXACT = 0.003  # of the step time that a factor has to bring about
_RANGE = (1e-4, 1e4)  # of factors of devices, which may hold a cost model that is far off
_UNEXPLAINED = 0.1  # share of the step time that busy seconds may leave open before links are looked at


@dataclass(frozen=True, eq=False)
class Cause:
    """One explanation.

    Attributes:
        name: For people.
        correction: The problem with it applied takes as long as was measured.
        amount: The factor; the further from 1, the less likely the cause is held to be.
        even: Everything changed alike, so that no plan gains by it.
    """

    name: str
    correction: Correction
    amount: float = 1.0
    even: bool = False


def weights_of(causes: Sequence[Cause]) -> NDArray[np.float64]:
    """float64 [causes], adding up to 1: in proportion to one over the factor, a prior with heavy tails."""
    weight = np.array([min(cause.amount, 1 / cause.amount) for cause in causes])
    return weight / weight.sum()


def run_plan(problem: Problem, plan: PlacementPlan) -> Timeline:
    """Simulates a plan without replicas, shards and recomputation on its problem, or on a correction of it."""
    free = None if plan.order is not None else plan.schedule
    return simulate(
        problem, plan.device_of_group, priority=plan.priority, order=plan.order, microbatches=plan.microbatches, schedule=free,
        stage_of_group=plan.stage_of_group,
    )  # fmt: skip


def causes_of(
    problem: Problem,
    plan: PlacementPlan,
    ratio: float,
    measured_s: float,
    busy_s: Sequence[float] | None = None,
    busy_before_s: Sequence[float] | None = None,
) -> tuple[list[Cause], bool, list[str]]:
    """Explanations of a drift; see `rlplace.agents.replan.replan` for the arguments.

    Returns:
        The causes; whether measurements single one out; and notes for people.

    Raises:
        InputError: The step cannot be simulated, or busy seconds do not fit the devices.
    """
    line = run_plan(problem, plan)
    if line.step_time_s is None:
        raise InputError("replan: the running plan's step cannot be simulated: " + "; ".join(line.violations))
    if busy_s is None:
        causes, notes = _guesses(problem, plan, line, no_correction(problem), line.step_time_s * ratio)
        return causes, False, notes
    # Both times with devices as they were measured, so that what matters to the step is not what the cost model thinks.
    now = _per_device(busy_s, problem)
    before = line.busy_s if busy_before_s is None else _per_device(busy_before_s, problem)
    base, past = _by_busy(problem, line, now), _by_busy(problem, line, before)
    name = _changes(problem, line, now, before)
    step_s = run_plan(corrected(problem, base), plan).step_time_s or math.inf
    target_s = measured_s
    if busy_before_s is not None:
        target_s = ratio * (run_plan(corrected(problem, past), plan).step_time_s or math.inf)
    if step_s >= (1 - _UNEXPLAINED) * target_s:
        return [Cause(name, base)], True, []
    links, notes = _links(problem, plan, line, base, target_s, MOST_CAUSES)
    links = [replace(link, name=f"{name}, {link.name}") for link in links]
    if not links:
        rest = f"the devices account for {step_s / target_s:.0%} of the step, and no link alone for the rest"
        return [Cause(name, base)], True, [rest]
    return links, len(links) == 1, notes


def _per_device(values: Sequence[float], problem: Problem) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (problem.num_devices,) or not np.isfinite(array).all() or array.min() < 0:
        raise InputError(f"replan: busy seconds must be {problem.num_devices} numbers from 0 up, one per device")
    return array


def _by_busy(problem: Problem, line: Timeline, busy: NDArray[np.float64]) -> Correction:
    """Every device by what it takes for what it is given; one that is given nothing is as far off as the others' median."""
    used = (line.busy_s > 0) & (busy > 0)
    if not used.any():
        raise InputError("replan: no device that the plan uses has busy seconds")
    factor = np.ones(problem.num_devices)
    factor[used] = np.clip(busy[used] / line.busy_s[used], *_RANGE)
    factor[~used] = float(np.median(factor[used]))
    return replace(no_correction(problem), device_factor=factor)


def _changes(problem: Problem, line: Timeline, now: NDArray[np.float64], before: NDArray[np.float64]) -> str:
    """Which devices have changed, for people."""
    used = np.flatnonzero((line.busy_s > 0) & (now > 0) & (before > 0))
    log = {int(d): math.log(now[d] / before[d]) for d in used}
    changed = sorted((d for d in log if abs(log[d]) > 0.05), key=lambda d: -abs(log[d]))
    told = [f"device {problem.devices[d].name} {_times(math.exp(log[d]))}" for d in changed[:4]]
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    return ", ".join(told) + more if told else "devices as before"


def _guesses(
    problem: Problem, plan: PlacementPlan, line: Timeline, base: Correction, target_s: float
) -> tuple[list[Cause], list[str]]:
    """Each device, each link, and everything alike."""
    ratio = target_s / (line.step_time_s or math.nan)
    devices = [int(d) for d in np.argsort(-line.busy_s) if line.busy_s[d] > 0]
    causes = []
    for device in devices[: MOST_CAUSES * 2 // 3]:
        factor = np.ones(problem.num_devices)

        def slower(amount: float, device: int = device, factor: NDArray[np.float64] = factor) -> Correction:
            return replace(base, device_factor=np.where(np.arange(len(factor)) == device, amount, factor))

        amount = _solve(problem, plan, slower, ratio, target_s)
        if amount is not None:
            causes.append(Cause(f"device {problem.devices[device].name} {_times(amount)}", slower(amount), amount))
    left = MOST_CAUSES - 1 - len(causes)
    links, notes = _links(problem, plan, line, base, target_s, left)
    if len(devices) > MOST_CAUSES * 2 // 3:
        notes.append(f"only the {MOST_CAUSES * 2 // 3} busiest devices were looked at")
    channels, pairs = base.channel_slowdown, base.pair_slowdown
    alike = replace(base, device_factor=base.device_factor * ratio, pair_slowdown=pairs * ratio, channel_slowdown=channels)
    return [*causes, *links, Cause(f"everything {_times(ratio)}", alike, ratio, even=True)], notes


def _links(
    problem: Problem, plan: PlacementPlan, line: Timeline, base: Correction, target_s: float, most: int
) -> tuple[list[Cause], list[str]]:
    """Each channel that the plan sends over; of those that join the same pairs, one."""
    channels = problem.links.effective_channels
    load: dict[int, float] = {}
    for source, destination, begin, end in zip(
        line.transfer_source, line.transfer_destination, line.transfer_start_s, line.transfer_end_s, strict=True
    ):
        for channel in channels[source][destination]:
            load[channel] = load.get(channel, 0.0) + float(end - begin)
    serves: dict[int, list[tuple[int, int]]] = {channel: [] for channel in load}
    for i, row in enumerate(channels):
        for j, cell in enumerate(row):
            for channel in set(cell) & load.keys():
                serves[channel].append((i, j))
    step_s = run_plan(corrected(problem, base), plan).step_time_s or math.nan
    causes: list[Cause] = []
    seen: set[tuple[tuple[int, int], ...]] = set()
    tried = 0
    for channel in sorted(load, key=lambda c: -load[c]):
        pairs = tuple(serves[channel])
        if pairs in seen:
            continue
        if tried == most:
            return causes, [f"only the {most} busiest links were looked at"]
        seen.add(pairs)
        tried += 1

        def slower(amount: float, channel: int = channel) -> Correction:
            slow = np.array(base.channel_slowdown)
            slow[channel] = amount
            return replace(base, channel_slowdown=slow)

        amount = _solve(problem, plan, slower, target_s / step_s, target_s)
        if amount is not None:
            causes.append(Cause(f"{_link_name(problem, pairs)} {_times(amount)}", slower(amount), amount))
    return causes, []


def _solve(
    problem: Problem, plan: PlacementPlan, slower: Callable[[float], Correction], ratio: float, target_s: float
) -> float | None:
    """The factor whose correction makes the step take `target_s`; None when none does."""

    def step_s(amount: float) -> float:
        return run_plan(corrected(problem, slower(amount)), plan).step_time_s or math.inf

    sign = 1.0 if ratio >= 1 else -1.0
    near, far = 0.0, math.log(_MOST)  # logs of the change
    if sign * (step_s(math.exp(sign * far)) - target_s) < 0:
        return None
    for _ in range(30):
        middle = (near + far) / 2
        found = step_s(math.exp(sign * middle))
        if abs(found - target_s) <= _EXACT * target_s:
            return math.exp(sign * middle)
        near, far = (middle, far) if sign * (found - target_s) < 0 else (near, middle)
    return math.exp(sign * far)  # the step time jumps over the target


def _times(amount: float) -> str:
    return f"{amount:.3g} times slower" if amount >= 1 else f"{1 / amount:.3g} times faster"


def _link_name(problem: Problem, pairs: Sequence[tuple[int, int]]) -> str:
    names = [f"{problem.devices[i].name} to {problem.devices[j].name}" for i, j in pairs[:2]]
    more = f" and {len(pairs) - 2} more pairs" if len(pairs) > 2 else ""
    return f"link {', '.join(names)}{more}"
