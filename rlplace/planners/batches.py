"""A global batch on a cluster: how many replicas, how many micro-batches, which schedule, and who runs what.

Problem: a step must process G samples. With R replicas of D / R devices and M micro-batches, a micro-batch has G / (R M)
samples, which needs a problem priced for that size. All choices process the same samples, so step times compare.

Algorithm: choices are tried in order of their lower bound (the work of a replica spread evenly over its devices), a replica's
plan being that of the classical floor on the first D / R devices, run with the `list` schedule and, where that does not fit,
with `1f1b`. A choice whose bound is not below the best step time so far is skipped. Where nothing fits, smaller micro-batches
than `MICROBATCHES` give are tried, the largest first. The named planner then works on the most promising choice with the time
that is left. Every candidate is simulated with all its replicas and their gradient exchange.

Departures: replicas are only tried on devices that are all alike, where the problem says how large gradients are, and are
blocks of consecutive devices, so that hosts stay whole. Statistical efficiency (more samples a step may need more steps) is
not looked at: the global batch is given.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError, InputError
from rlplace.plan import PlacementPlan
from rlplace.planners import ONE_SHOT, get_planner
from rlplace.planners.best import warm_up
from rlplace.planners.evaluate import Deadline, Execution
from rlplace.problem import UPDATE, Links, Problem
from rlplace.simulator import simulate
from rlplace.simulator.replicas import gradient_edges

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of micro-batches that are tried; where one does not divide the batch, the next larger one that does."""

MORE_MICROBATCHES = (128, 256, 512, 1024)
"""The same, for when none of the others fits."""

MAX_GLOBAL_BATCH = 1 << 24
"""Samples that a step may have."""

QUICK = frozenset({*ONE_SHOT, "best", "random"})
"""Planners that are quick enough to be run for every choice."""


@dataclass(frozen=True)
class Choice:
    """One way to split a global batch.

    Attributes:
        replicas: R.
        microbatches: M.
        samples: Samples of one micro-batch.
    """

    replicas: int
    microbatches: int
    samples: int


Placed = tuple[Problem, PlacementPlan]
"""A problem and a plan for it."""


def choices(
    global_batch: int,
    num_devices: int,
    *,
    alike: bool,
    samples: int | None = None,
    microbatches: tuple[int, ...] = MICROBATCHES,
) -> list[Choice]:
    """All splits of a global batch that are tried.

    Args:
        global_batch: Samples of a step.
        num_devices: D.
        alike: Whether the devices are interchangeable, so that replicas make sense.
        samples: The only micro-batch size there is; None where any can be priced.
        microbatches: See `MICROBATCHES`.
    """
    found = []
    for replicas in range(1, num_devices + 1 if alike else 2):
        if num_devices % replicas or global_batch % replicas:
            continue
        share = global_batch // replicas
        if samples is not None:
            counts = set() if share % samples else {share // samples}
        else:
            divisors = _divisors(share)
            at = {bisect.bisect_left(divisors, number) for number in microbatches}
            counts = {divisors[i] for i in at if i < len(divisors) and divisors[i] <= microbatches[-1]}
        found += [Choice(replicas, count, share // count) for count in sorted(counts)]
    return found


def _divisors(number: int) -> list[int]:
    """In increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def exchanges_gradients(problem: Problem) -> bool:
    """Whether replicas of the problem could exchange gradients: it says how large those are, or updates nothing."""
    updated = problem.op_group[problem.consumers[gradient_edges(problem)]]
    return bool((problem.gradient_bytes[updated] >= 0).all())


def devices_alike(problem: Problem) -> bool:
    """Whether every op takes the same time on all devices, and all have the same memory."""
    limits = {(device.memory_bytes, device.reserved_bytes) for device in problem.devices}
    times = np.nan_to_num(problem.time_s, nan=-1.0)
    return len(limits) == 1 and bool((times == times[:, :1]).all()) and not (problem.group_device >= 0).any()


def place_batches(
    problem_of: Callable[[int], Problem],
    global_batch: int,
    *,
    samples: int | None = None,
    first: Problem,
    planner: str = "agent",
    seed: int = 0,
    time_limit_s: float | None = None,
    **options: Any,
) -> Placed:
    """The best plan for a global batch; see the module docstring.

    Args:
        problem_of: The problem priced for a micro-batch of so many samples; the devices are the same for all.
        global_batch: Samples of a step, G.
        samples: The only micro-batch size that `problem_of` knows; None for any.
        first: One of the problems, to look at its devices.
        planner: Works on the most promising choice; a quick one on all of them.
        seed: Of the planner.
        time_limit_s: Wall time of the planning, pricing excluded.
        **options: Options of the planner.

    Returns:
        The problem and its plan; the plan's ``predicted["choices"]`` lists what was tried.

    Raises:
        InputError: The global batch cannot be split.
        InfeasibleError: No choice fits.
    """
    warm_up()  # not on the clock
    alike = devices_alike(first) and exchanges_gradients(first)
    splits = choices(global_batch, first.num_devices, alike=alike, samples=samples)
    if not splits and samples is not None:
        raise InputError(
            f"global batch {global_batch} is no multiple of the micro-batch of {samples} samples; "
            "use a multiple, or place the model itself, so that other micro-batches can be priced"
        )
    quick = planner if planner in QUICK else "best"
    sweep = _Sweep(problem_of, quick, seed, time_limit_s, options if quick == planner else {})
    sweep.try_all(splits)
    if sweep.best is None and samples is None:
        more = choices(global_batch, first.num_devices, alike=alike, microbatches=MORE_MICROBATCHES)
        for size in sorted({split.samples for split in more} - {split.samples for split in splits}, reverse=True):
            sweep.try_all([split for split in more if split.samples == size])
            if sweep.best is not None:
                break
    if sweep.best is None:
        raise sweep.reason or InfeasibleError(
            f"no split of {global_batch} samples fits; use more devices or a smaller global batch"
        )
    best, split = sweep.best
    if quick != planner:
        left = None if time_limit_s is None else max(sweep.deadline.left_s(), 0.1)
        try:
            found = _place(best[0], split, planner, seed, left, options, schedules=(best[1].schedule,))
        except InfeasibleError:  # the replicas' gradient exchange left no room for it; the floor stands
            found = best
        best = min(best, found, key=_step_s)
    predicted = {**best[1].predicted, "choices": sweep.tried}
    return best[0], dataclasses.replace(best[1], planner=planner, predicted=predicted)


class _Sweep:
    """Tries choices with a quick planner and keeps the best.

    Attributes:
        deadline: Runs while planners do, not while problems are priced.
        best: The best plan with its problem, and its choice.
        reason: Why the first choice that did not fit did not.
        tried: An entry a choice.
    """

    def __init__(
        self,
        problem_of: Callable[[int], Problem],
        planner: str,
        seed: int,
        time_limit_s: float | None,
        options: dict[str, Any],
    ) -> None:
        self._problem_of, self._planner, self._seed, self._options = problem_of, planner, seed, options
        self._limit_s = time_limit_s
        self.deadline = Deadline(time_limit_s)
        self.best: tuple[Placed, Choice] | None = None
        self.reason: InfeasibleError | None = None
        self.tried: list[dict[str, Any]] = []

    def try_all(self, splits: list[Choice]) -> None:
        """Tries choices, the most promising first, while they can win and there is time."""
        began = time.monotonic()
        problems = {size: self._problem_of(size) for size in sorted({split.samples for split in splits})}
        self.deadline.end_s += time.monotonic() - began
        ranked = sorted(splits, key=lambda split: (_bound_s(problems[split.samples], split), split.microbatches))
        for split in ranked:
            problem = problems[split.samples]
            if self.best is not None:
                late = self.deadline.left_s() < 0.4 * (self._limit_s or 0.0)
                if late or _bound_s(problem, split) >= _step_s(self.best[0]):
                    continue
            entry: dict[str, Any] = {**dataclasses.asdict(split), "step_time_s": None}
            self.tried.append(entry)
            limit = _share(self.deadline, len(ranked))
            try:
                found = _place(problem, split, self._planner, self._seed, limit, self._options)
            except InfeasibleError as error:
                self.reason = self.reason or error
                continue
            entry["step_time_s"] = _step_s(found)
            if self.best is None or _step_s(found) < _step_s(self.best[0]):
                self.best = found, split


def _place(
    problem: Problem,
    split: Choice,
    planner: str,
    seed: int,
    time_limit_s: float | None,
    options: dict[str, Any],
    schedules: tuple[str, ...] = ("list", "1f1b"),
) -> Placed:
    """The plan of one choice for the first schedule that fits, with all replicas simulated.

    Raises:
        InfeasibleError: The planner found none, with any of the schedules.
    """
    share = problem.num_devices // split.replicas
    target = problem if split.replicas == 1 else _first_devices(problem, share)
    rows = [list(range(r * share, (r + 1) * share)) for r in range(split.replicas)]
    reason: InfeasibleError | None = None
    for schedule in schedules if split.microbatches > 1 else ("list",):
        run = Execution(split.microbatches, schedule).arguments
        try:
            plan = get_planner(planner)(target, seed=seed, time_limit_s=time_limit_s, **options, **run)
        except InfeasibleError as error:
            reason = error
            continue
        if split.replicas == 1:
            return problem, plan
        plan = dataclasses.replace(plan, problem=problem.fingerprint, replicas=rows)
        line = simulate(problem, plan)
        if line.feasible:
            return problem, plan.with_predicted({**plan.predicted, **line.predicted(problem)})
        reason = InfeasibleError(line.violations[0])
    assert reason is not None
    raise reason


def _first_devices(problem: Problem, count: int) -> Problem:
    """The problem on the first devices alone."""
    links, own = problem.links, slice(0, count)
    channels = None if links.channels is None else tuple(row[own] for row in links.channels[own])
    return dataclasses.replace(
        problem,
        devices=problem.devices[own],
        links=Links(links.bandwidth_bytes_per_s[own, own], links.latency_s[own, own], channels),  # no collectives to price
        time_s=np.ascontiguousarray(problem.time_s[:, own]),
        tensor_transfer_s={tensor: table[own, own] for tensor, table in problem.tensor_transfer_s.items()},
    )


def _bound_s(problem: Problem, split: Choice) -> float:
    """No plan of the choice is faster: a replica's work, spread evenly over its devices."""
    once = problem.op_phase == UPDATE
    fastest = np.nanmin(problem.time_s, axis=1)
    work = split.microbatches * float(fastest[~once].sum()) + float(fastest[once].sum())
    return work * split.replicas / problem.num_devices


def _share(deadline: Deadline, count: int) -> float | None:
    left = deadline.left_s()
    return None if math.isinf(left) else max(left / max(2, min(count, 4)), 0.05)


def _step_s(placed: Placed) -> float:
    return float(placed[1].predicted["step_time_s"])
