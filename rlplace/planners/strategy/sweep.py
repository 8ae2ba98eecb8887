"""A step on a cluster: single device, model parallel, pipeline, data parallel or a combination, whichever is quickest.

Problem: a step processes G samples. With R replicas of W devices and M micro-batches, a micro-batch has G / (R M) samples,
which needs a problem priced for that size. All strategies process the same samples, so step times compare. With a curve of
statistical efficiency (`rlplace.strategy.efficiency`) it is the samples of a replica that are given, larger global
batches may need more epochs, and what compares is the time to the target: epochs(G) x step time / G (Pal et al., "Optimizing
multi-GPU parallelization strategies for deep learning training", IEEE Micro 2019).

Algorithm: strategies on one device a replica come first, since they need no planner; then the others, the most promising first.
A strategy whose lower bound (a replica's work spread evenly over its devices, and its critical path) is not below the best so
far is skipped, except that every basic kind is tried once, so that the answer can say how they compare. A replica's plan is
that of the classical floor; schedules are searched for it. Where nothing fits, smaller micro-batches are tried, the largest
first. The named planner then works on the winner with the time that is left. Every candidate is simulated with all its replicas
and their gradient exchange.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import ONE_SHOT, takes_microbatches
from rlplace.planners.best import warm_up
from rlplace.planners.common.bounds import critical_path_s
from rlplace.planners.common.evaluate import Deadline
from rlplace.planners.strategy.choices import (
    MICROBATCHES,
    MORE_MICROBATCHES,
    StageLayout,
    Strategy,
    kind_of,
    layouts,
    strategies,
)
from rlplace.planners.strategy.one import Placed, place_one
from rlplace.problem import UPDATE, Problem
from rlplace.schedule import LIST, free_schedule
from rlplace.simulator.tasks import MAX_TASKS

QUICK = frozenset({*ONE_SHOT, "best", "random"})
"""Planners that are quick enough to be run for every strategy."""

BASIC = ("single device", "data parallel", "pipeline", "model parallel")
"""Kinds of which one strategy is always tried."""


def place_strategies(
    problem_of: Callable[[int], Problem],
    *,
    first: Problem,
    global_batch: int | None = None,
    curve: Any | None = None,
    samples: int | None = None,
    planner: str = "agent",
    seed: int = 0,
    time_limit_s: float | None = None,
    **options: Any,
) -> Placed:
    """The best plan over all strategies; see the module docstring.

    Args:
        problem_of: The problem priced for a micro-batch of so many samples; the devices are the same for all.
        first: One of the problems, to look at its devices; with `curve`, its samples are those of a replica.
        global_batch: Samples of a step, G; left out with `curve`.
        curve: Epochs by global batch; the global batch is then chosen as well.
        samples: The only micro-batch size that `problem_of` knows; None for any.
        planner: Works on the most promising strategy; a quick one on all of them.
        seed: The seed of the planner.
        time_limit_s: Wall time of the planning, pricing excluded.
        **options: Options of the planner.

    Returns:
        The problem and its plan; the plan's ``predicted.strategies`` lists all of them with what was found.

    Raises:
        InputError: The global batch cannot be split, or both or neither of `global_batch` and `curve` are given.
        InfeasibleError: No strategy fits.
    """
    if (global_batch is None) == (curve is None):
        raise InputError("place: give either a global batch, or a batch curve that chooses it")
    warm_up()  # not on the clock

    def listed(microbatches: tuple[int, ...]) -> list[Strategy]:
        possible: list[Strategy] = []
        for layout in layouts(first):
            share = first.samples_per_microbatch if global_batch is None else global_batch // layout.replicas
            if global_batch is None or global_batch % layout.replicas == 0:
                possible += strategies(layout, share, samples=samples, microbatches=microbatches)
        return possible if takes_microbatches(planner) else [s for s in possible if s.microbatches == 1]

    every = listed(MICROBATCHES)
    if not every and samples is not None:
        raise InputError(
            f"global batch {global_batch} is no multiple of the micro-batch of {samples} samples; "
            "use a multiple, or place the model itself, so that other micro-batches can be priced"
        )
    quick = planner if planner in QUICK else "best"
    sweep = _Sweep(problem_of, quick, seed, time_limit_s, options if quick == planner else {}, curve)
    sweep.try_all(every)
    if sweep.best is None and samples is None:
        more = set(listed(MORE_MICROBATCHES)) - set(every)
        for size in sorted({s.samples for s in more}, reverse=True):
            sweep.try_all([s for s in more if s.samples == size])
            if sweep.best is not None:
                break
    if sweep.best is None:
        raise sweep.reason or InfeasibleError("no way to split the batch fits; use more devices or a smaller batch")
    best, strategy = sweep.best
    if quick != planner:
        left = None if time_limit_s is None else max(sweep.deadline.left_s(), 0.1)
        schedules = (free_schedule(best[1].schedule, LIST),)
        try:
            arguments: dict[str, Any] = {"seed": seed, "time_limit_s": left, "options": options, "schedules": schedules}
            best = min(best, place_one(best[0], strategy, planner, **arguments), key=_step_s)
        except InfeasibleError:  # the replicas' gradient exchange left no room for it; the floor stands
            pass
    predicted = best[1].predicted.told(strategies=tuple(sweep.entries()))
    return best[0], dataclasses.replace(best[1], planner=planner, predicted=predicted)


class _Sweep:
    """Tries strategies with a quick planner and keeps the best.

    Attributes:
        deadline: Runs while planners do, not while problems are priced.
        best: The best plan with its problem, and its strategy.
        reason: Why the strategy that came closest did not fit.
    """

    def __init__(
        self,
        problem_of: Callable[[int], Problem],
        planner: str,
        seed: int,
        time_limit_s: float | None,
        options: dict[str, Any],
        curve: Any | None,
    ) -> None:
        self._problem_of, self._planner, self._seed, self._options = problem_of, planner, seed, options
        self._limit_s, self._curve = time_limit_s, curve
        self.deadline = Deadline(time_limit_s)
        self.best: tuple[Placed, Strategy] | None = None
        self.reason: InfeasibleError | None = None
        self._entries: dict[Strategy, dict[str, Any]] = {}

    def entries(self) -> list[dict[str, Any]]:
        """An entry a strategy: the quickest first, then what was not tried, then what does not fit."""
        return sorted(
            self._entries.values(),
            key=lambda e: (e["step_time_s"] is None, e["bound_s"] is None, e["cost"] or 0.0, e["bound_s"] or 0.0),
        )

    def try_all(self, every: list[Strategy]) -> None:
        """Tries strategies, the most promising first, while they can win and there is time."""
        began = time.monotonic()
        problems = {size: self._problem_of(size) for size in sorted({s.samples for s in every})}
        paths = {size: critical_path_s(problem) for size, problem in problems.items()}
        bounds = {s: max(_work_s(problems[s.samples], s), paths[s.samples]) for s in every}
        self.deadline.end_s += time.monotonic() - began
        missing = set(BASIC)

        def promise(s: Strategy) -> tuple[Any, ...]:
            """One device a replica first; then by the bound with the bubble of an even pipeline on top."""
            bubble = (s.microbatches + s.layout.width - 1) / s.microbatches
            return s.layout.width > 1, self._cost(bounds[s] * bubble, s), s.microbatches, s.layout.rows

        for strategy in sorted(every, key=promise):
            problem, bound = problems[strategy.samples], bounds[strategy]
            kind = kind_of(strategy.layout.replicas, strategy.layout.width, strategy.microbatches)
            entry = self._entries[strategy] = _entry(strategy, kind, bound if math.isfinite(bound) else None)
            if self.best is not None and kind not in missing and self._cost(bound, strategy) >= self._best_cost():
                entry["reason"] = "cannot be quicker than the best"
            elif self.best is not None and self.deadline.left_s() < 0.4 * (self._limit_s or 0.0):
                entry["reason"] = "not tried: the time was up"
            elif problem.num_ops * strategy.layout.replicas * strategy.microbatches > MAX_TASKS // 4:
                entry["reason"] = "not tried: too many micro-batches to simulate"
            else:
                self._try(problem, strategy, entry, _share(self.deadline, len(every)))
                if entry["step_time_s"] is not None:
                    missing.discard(kind)

    def _try(self, problem: Problem, strategy: Strategy, entry: dict[str, Any], limit_s: float | None) -> None:
        try:
            placed = place_one(problem, strategy, self._planner, seed=self._seed, time_limit_s=limit_s, options=self._options)
        except InfeasibleError as error:
            if self.reason is None or 0 < error.short_bytes < self.reason.short_bytes:
                self.reason = error
            entry |= {"bound_s": None, "reason": f"does not fit: {error}"}
            return
        plan = placed[1]
        busy_s = plan.predicted.compute or 0.0
        predicted, used = plan.predicted, len(np.unique(plan.device_of_group))
        entry |= {
            "kind": kind_of(strategy.layout.replicas, used, strategy.microbatches),
            "width": used,
            "schedule": plan.schedule,
            "step_time_s": predicted.step_time_s,
            "samples_per_s": predicted.samples_per_s,
            "busy": busy_s / max(busy_s + (predicted.idle or 0.0), 1e-30),
            "cost": self._cost(predicted.step_s, strategy),
            "epochs": None if self._curve is None else self._curve.epochs(strategy.global_batch),
        }
        if self.best is None or entry["cost"] < self._best_cost():
            self.best = placed, strategy

    def _cost(self, step_s: float, strategy: Strategy) -> float:
        """Seconds a sample, times the epochs that so large a batch needs."""
        epochs = 1.0 if self._curve is None else self._curve.epochs(strategy.global_batch)
        return epochs * step_s / strategy.global_batch

    def _best_cost(self) -> float:
        assert self.best is not None
        return self._cost(_step_s(self.best[0]), self.best[1])


def _entry(strategy: Strategy, kind: str, bound_s: float | None) -> dict[str, Any]:
    return {
        "kind": kind,
        "replicas": strategy.layout.replicas,
        "width": strategy.layout.width,
        "microbatches": strategy.microbatches,
        "samples": strategy.samples,
        "schedule": None,
        "step_time_s": None,
        "samples_per_s": None,
        "busy": None,
        "bound_s": bound_s,
        "cost": None,
        "epochs": None,
        "reason": None,
    }


def _work_s(problem: Problem, strategy: Strategy) -> float:
    """No plan of the strategy is quicker: a replica's work, spread evenly over the devices that it may use."""
    once = problem.op_phase == UPDATE
    aside = [op for collective in problem.collectives for op in collective.ops]  # they hold no device
    longest = 0.0
    rows, width = strategy.layout.rows, strategy.layout.width
    if strategy.layout == StageLayout(((0,),)):  # one device, any; where it may not run all groups, others help out
        rows = (tuple(range(problem.num_devices)),)
        width = 1 if problem.group_allowed.all() else problem.num_devices
    for row in rows:
        fastest = np.where(np.isnan(times := problem.time_s[:, list(row)]), np.inf, times).min(axis=1)
        fastest[aside] = 0.0
        work = strategy.microbatches * float(fastest[~once].sum()) + float(fastest[once].sum())
        longest = max(longest, work / width)
    return longest


def _share(deadline: Deadline, count: int) -> float | None:
    left = deadline.left_s()
    return None if math.isinf(left) else max(left / max(2, min(count, 4)), 0.05)


def _step_s(placed: Placed) -> float:
    return placed[1].predicted.step_s
