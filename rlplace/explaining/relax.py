"""What would make an infeasible problem or plan fit: every suggestion is planned and simulated before it is made.

First what is missing: the bytes that no plan can do without, as far as a bound proves them, and those that the closest plan is
short of. Then relaxations, one after the other: another plan, fewer samples a micro-batch (as many more of them, so that the
step processes the same), recomputation, a sharded or smaller optimizer, one more device or more of them, more memory. If none
of those that leave the hardware alone is enough, they are combined. What was tried and does not fit is listed with the bytes
that it still lacks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError, InputError
from rlplace.explaining import changes
from rlplace.explaining.runs import Run, run_unchecked
from rlplace.explaining.text import gb, gigabytes, ms, table
from rlplace.plan.plan import FREE_SCHEDULES, PlacementPlan
from rlplace.plan.recompute import recompute
from rlplace.plan.segments import layer_segments
from rlplace.planners import get_planner
from rlplace.planners.common.bounds import lower_bounds
from rlplace.planners.common.shortage import check_possible
from rlplace.problem import Problem

MOST_DEVICES = 64
"""Devices up to which more of them are tried."""

MOST_MEMORY = 8.0
"""Times the memory that is tried."""

Segments = list[list[int]]


@dataclass(frozen=True)
class Shortage:
    """What is missing.

    Attributes:
        message: Which constraint fails, where, by how much.
        device: The device that is short, None when it is all of them together or another constraint.
        short_bytes: Missing in the plan, or in the closest plan that was found; what is proven where no plan was looked at.
        proven_bytes: Missing in every plan: total demand over total capacity, or the largest group over the largest device; 0
            when no bound says that there is no plan.
        proven: No plan of the problem fits, whatever its devices.
    """

    message: str
    device: str | None
    short_bytes: int
    proven_bytes: int
    proven: bool


@dataclass(frozen=True)
class Trial:
    """One relaxation, planned and simulated.

    Attributes:
        relaxation: In words.
        fits: A plan was found that completes and fits.
        step_time_s: Of that plan, else None.
        samples: Samples of its step.
        peak_bytes: Its fullest device, else 0.
        short_bytes: Still missing when it does not fit: in the closest plan, or proven.
        how: Micro-batches, schedule and planner of the plan that fits; why it could not be tried or does not fit.
    """

    relaxation: str
    fits: bool
    step_time_s: float | None
    samples: int
    peak_bytes: int
    short_bytes: int
    how: str


@dataclass(frozen=True)
class Relaxations:
    """What is missing, and what was tried.

    Attributes:
        shortage: Why it does not fit.
        trials: In the order in which they were made.
        not_tried: What was not, and why.
    """

    shortage: Shortage
    trials: tuple[Trial, ...]
    not_tried: tuple[str, ...]

    @property
    def fitting(self) -> tuple[Trial, ...]:
        """Those that make it fit."""
        return tuple(trial for trial in self.trials if trial.fits)

    def lines(self) -> list[str]:
        """For people."""
        lines = [self.shortage.message]
        if self.shortage.proven:
            lines.append("proven: no plan of this problem fits")
        if self.fitting:
            rows = [
                [t.relaxation, ms(t.step_time_s), str(t.samples), gb(t.peak_bytes)]
                for t in sorted(self.fitting, key=lambda t: _per_sample(t))
            ]
            lines += ["", *table(["makes it fit (simulated)", "step ms", "samples", "peak GB"], rows)]
            lines += [f"{t.relaxation}: {t.how}" for t in self.fitting if t.how]
        else:
            lines.append("nothing that was tried makes it fit")
        failed = [trial for trial in self.trials if not trial.fits]
        if failed:
            rows = [[t.relaxation, gigabytes(t.short_bytes) if t.short_bytes else t.how] for t in failed]
            lines += ["", *table(["tried, does not fit", "still short"], rows)]
        return [*lines, *(f"not tried: {line}" for line in self.not_tried)]


def _per_sample(trial: Trial) -> float:
    return math.inf if trial.step_time_s is None else trial.step_time_s / max(trial.samples, 1)


def relax(
    problem: Problem,
    *,
    plan: PlacementPlan | None = None,
    at: Callable[[int], Problem] | None = None,
    finer: Callable[[], Problem] | None = None,
    microbatches: int = 1,
    schedule: str = "list",
    calls: int = 256,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> Relaxations:
    """Looks for what makes a problem, or a plan, fit.

    Args:
        problem: The problem.
        plan: A plan for it that does not fit; its micro-batches and schedule replace those given.
        at: Prices the problem for a micro-batch of so many samples; None: the batch is left as it is.
        finer: Prices it with finer groups.
        microbatches: Of the execution that does not fit.
        schedule: Likewise.
        calls: Simulations of a search where the classical floor finds nothing.
        time_limit_s: Seconds of each planner.
        seed: Of the search.
    """
    if plan is not None:
        microbatches, schedule = plan.microbatches, plan.schedule
    schedule = schedule if schedule in FREE_SCHEDULES else "1f1b"
    tester = _Tester(calls, time_limit_s, seed, microbatches, schedule)
    run = None if plan is None else run_unchecked(problem, plan)
    shortage, known = _shortage(problem, run, tester)
    work = _Relaxing(problem, run, at, finer, tester)
    trials = [*known, *work.trials(shortage)]
    return Relaxations(shortage, tuple(trials), tuple(work.not_tried))


class _Tester:
    """Plans and simulates changed problems."""

    def __init__(self, calls: int, time_limit_s: float | None, seed: int, microbatches: int, schedule: str) -> None:
        self.calls, self.time_limit_s, self.seed = calls, time_limit_s, seed
        self.microbatches, self.schedule = microbatches, schedule

    def plan(self, name: str, problem: Problem, *, microbatches: int | None = None) -> Trial:
        """The best plan by the floor, else by a search; with several micro-batches also under 1f1b, which holds less."""
        count = self.microbatches if microbatches is None else microbatches
        schedules = dict.fromkeys([self.schedule, "1f1b"] if count > 1 else ["list"])
        closest: InfeasibleError | None = None
        for schedule in schedules:
            execution: dict[str, Any] = {"microbatches": count, "schedule": schedule}
            limits: dict[str, Any] = {"seed": self.seed, "time_limit_s": self.time_limit_s}
            for planner, extra in (("best", {}), ("annealing", {"calls": self.calls})):
                if planner == "annealing" and self.calls == 0:
                    continue
                try:
                    found = get_planner(planner)(problem, **limits, **extra, **execution)
                except InfeasibleError as error:
                    if closest is None or 0 < error.short_bytes < closest.short_bytes or closest.short_bytes == 0:
                        closest = error
                    continue
                how = f"planner {planner}"
                if count > 1:
                    how += f", {count} micro-batches of {problem.samples_per_microbatch}, schedule {schedule}"
                return Trial(
                    name, True, float(found.predicted["step_time_s"]), problem.samples_per_microbatch * count,
                    max(found.predicted["peak_memory_bytes"]), 0, how,
                )  # fmt: skip
        assert closest is not None
        short = closest.short_bytes
        return Trial(name, False, None, problem.samples_per_microbatch * count, 0, short, _without_advice(closest))


def _without_advice(error: InfeasibleError) -> str:
    """What the message says before it advises: advice here is tested first."""
    return str(error).partition("; ")[0]


def simulated(name: str, run: Run) -> Trial:
    """A trial of a plan as it is."""
    line = run.line
    if line.feasible:
        return Trial(name, True, line.step_time_s, line.samples, int(line.peak_memory_bytes.max()), 0, "")
    return Trial(name, False, None, line.samples, 0, overflow(run)[1], line.violations[0])


def overflow(run: Run) -> tuple[int, int]:
    """The device that is short of most bytes, and how many; 0 where memory is not what fails."""
    limits = np.array([np.inf if d.memory_bytes is None else d.memory_bytes for d in run.problem.devices])
    over = np.maximum(run.line.peak_memory_bytes - limits, 0.0)
    return int(over.argmax()), int(over.max())


def _shortage(problem: Problem, run: Run | None, tester: _Tester) -> tuple[Shortage, list[Trial]]:
    """What is missing, and what had to be tried to know."""
    single = run is None or len(run.plan.replicas or [()]) == 1
    bounds = lower_bounds(problem)
    proven = max(0, int(bounds.resident_bytes + bounds.live_bytes - bounds.capacity_bytes)) if single and math.isfinite(
        bounds.capacity_bytes
    ) else 0  # fmt: skip
    impossible: InfeasibleError | None = None
    try:
        check_possible(problem)
    except InfeasibleError as error:
        impossible = error
        proven = max(proven, error.short_bytes)
    if run is not None:
        device, short = overflow(run)
        message = "; ".join(run.line.violations)
        name = problem.devices[device].name if short else None
        return Shortage(f"the plan does not fit: {message}", name, short, proven, impossible is not None), []
    if impossible is not None:
        short, name = max(proven, impossible.short_bytes), impossible.device
        if problem.num_devices == 1 and problem.group_allowed.all():  # there is one plan, so its shortage is exact
            from rlplace.simulator import simulate

            line = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32), **_execution(tester))
            limit = problem.devices[0].memory_bytes
            if line.step_time_s is not None and limit is not None:
                short = proven = int(line.peak_memory_bytes[0]) - limit
                name = problem.devices[0].name
        return Shortage(_without_advice(impossible), name, short, proven, True), []
    trial = tester.plan("another plan", problem)
    message = "a plan fits, found by a longer search" if trial.fits else trial.how
    return Shortage(message, None, trial.short_bytes, 0, False), [trial]


def _execution(tester: _Tester) -> dict[str, Any]:
    return {"microbatches": tester.microbatches, "schedule": tester.schedule}


class _Relaxing:
    """Makes the trials."""

    def __init__(
        self,
        problem: Problem,
        run: Run | None,
        at: Callable[[int], Problem] | None,
        finer: Callable[[], Problem] | None,
        tester: _Tester,
    ) -> None:
        self.problem, self.run, self.at, self.finer, self.tester = problem, run, at, finer, tester
        self.replicated = run is not None and len(run.plan.replicas or [()]) > 1
        self.cut = run is not None and bool(run.plan.shards)
        self.recomputed = run is not None and bool(run.plan.recompute)
        self.not_tried: list[str] = []

    def test(self, name: str, problem: Problem, *, microbatches: int | None = None, again: Segments | None = None) -> Trial:
        """A changed problem: the plan itself when it has replicas or cut ops, which planners do not plan; else a new plan."""
        if self.run is not None and (self.replicated or self.cut):
            plan = self.run.plan
            if microbatches is not None:
                plan = dataclasses.replace(plan, microbatches=microbatches, order=None)
            if again is not None:
                plan = dataclasses.replace(plan, recompute=again, priority=None, order=None)
            return simulated(name, run_unchecked(problem, plan))
        segments = again if again is not None else self.run.plan.recompute if self.run is not None else None
        return self.tester.plan(name, recompute(problem, segments) if segments else problem, microbatches=microbatches)

    def trials(self, shortage: Shortage) -> Iterator[Trial]:
        """All of them, the gentle ones first."""
        if self.run is not None and not shortage.proven and not self.cut:
            name = "one replica over all devices" if self.replicated else "another plan"
            yield self.tester.plan(name, self.problem)
        gentle = [*self.fewer_samples(), *self.recomputation(), *self.optimizer(), *self.finer_groups()]
        yield from gentle
        yield from self.devices(shortage)
        yield from self.memory()
        if not any(trial.fits for trial in gentle):
            yield from self.combined()

    def sizes(self) -> list[int]:
        """Smaller micro-batches that divide the present one, halving."""
        samples = self.problem.samples_per_microbatch
        smaller = [n for n in range(samples - 1, 0, -1) if samples % n == 0]
        kept: list[int] = []
        for size in smaller:
            if not kept or 2 * size <= kept[-1]:
                kept.append(size)
        return kept

    def fewer_samples(self) -> Iterator[Trial]:
        if self.at is None:
            self.not_tried.append("fewer samples a micro-batch, which needs the model; name it instead of a problem file")
            return
        if not self.sizes():
            self.not_tried.append("fewer samples a micro-batch, which has one already")
        for size in self.sizes():
            count = self.problem.samples_per_microbatch // size * self.tester.microbatches
            trial = self.test(f"{count} micro-batches of {size}", self.at(size), microbatches=count)
            yield trial
            if trial.fits:
                return

    def recomputation(self) -> Iterator[Trial]:
        if self.recomputed:
            self.not_tried.append("recomputation, which the plan has already")
            return
        if self.cut:
            self.not_tried.append("recomputation, which plans with cut ops cannot have")
            return
        for name, segments in self.segments():
            trial = self.tested_again(name, self.problem, segments)
            if trial is not None:
                yield trial
                if trial.fits:
                    return

    def tested_again(self, name: str, problem: Problem, segments: Segments) -> Trial | None:
        try:
            return self.test(name, problem, again=segments)
        except InputError as error:
            self.not_tried.append(f"{name}: {error}")
            return None

    def segments(self) -> list[tuple[str, Segments]]:
        """Ways to recompute: every layer of a model by itself, or several layers; blocks of groups where there are none."""
        try:
            each, several = layer_segments(self.problem, layers=1), layer_segments(self.problem, layers=None)
        except InputError:
            order = np.argsort(self._first_position(), kind="stable").tolist()
            size = max(1, round(math.sqrt(len(order))))
            blocks = [sorted(order[i : i + size]) for i in range(0, len(order), size)]
            return [(f"recomputation in {len(blocks)} blocks of groups", blocks)]
        ways = [(f"recomputation of {len(each)} layers, each by itself", each)]
        if several != each:
            ways.append((f"recomputation in {len(several)} blocks of layers", several))
        return ways

    def _first_position(self) -> np.ndarray:
        """int64 [G], where the first op of each group is in a topological order."""
        position = np.empty(self.problem.num_ops, dtype=np.int64)
        position[self.problem.topological_order] = np.arange(self.problem.num_ops)
        first = np.full(self.problem.num_groups, self.problem.num_ops, dtype=np.int64)
        np.minimum.at(first, self.problem.op_group, position)
        return first

    def optimizer(self) -> Iterator[Trial]:
        state = int(np.maximum(self.problem.optimizer_bytes, 0).sum())
        if state == 0:
            self.not_tried.append("optimizer sharding or a smaller optimizer: the problem names no optimizer state")
            return
        if self.replicated and self.run is not None and not self.run.plan.optimizer_sharding:
            plan = dataclasses.replace(self.run.plan, optimizer_sharding=True)
            yield simulated("optimizer sharded over the replicas", run_unchecked(self.problem, plan))
        elif not self.replicated:
            self.not_tried.append("optimizer sharding: with one replica every state is kept once already")
        for name, keep in self.smaller():
            trial = self.test(name, changes.without_optimizer(self.problem, keep))
            yield trial
            if trial.fits:
                return

    def smaller(self) -> list[tuple[str, float]]:
        """Optimizers with less state, and what share of the present one they keep."""
        now = ((self.problem.source or {}).get("graph") or {}).get("optimizer")
        half = [("optimizer momentum (half the state)", 0.5)] if now in ("adam", "adamw") else []
        return [*half, ("optimizer sgd (no state)", 0.0)]

    def finer_groups(self) -> Iterator[Trial]:
        if self.finer is not None and self.run is None:
            problem = self.finer()
            if problem.num_groups > self.problem.num_groups:
                yield self.test(f"finer groups ({problem.num_groups} instead of {self.problem.num_groups})", problem)

    def devices(self, shortage: Shortage) -> Iterator[Trial]:
        if self.replicated:
            self.not_tried.append("one more device: the plan's replicas would not use it")
            return
        limits = self.problem.memory_limit_bytes
        like = int(limits.argmax())
        count, problem = 0, self.problem
        least = math.ceil(shortage.proven_bytes / max(float(limits[like]), 1.0)) if math.isfinite(limits[like]) else 1
        wanted = 1
        while problem.num_devices + (wanted - count) <= MOST_DEVICES:
            while count < wanted:
                larger = changes.with_device(problem, like)
                if larger is None:
                    self.not_tried.append("one more device: the problem has one and does not say how a second would be linked")
                    return
                problem, count = larger, count + 1
            noun = "device" if count == 1 else "devices"
            trial = self.test(f"{count} more {noun} like {self.problem.devices[like].name}", problem)
            yield trial
            if trial.fits:
                return
            wanted = max(2 * count, least)

    def memory(self) -> Iterator[Trial]:
        """Twice, four or eight times the memory; once that is enough, about the least that is."""
        sizes = sorted({d.memory_bytes for d in self.problem.devices if d.memory_bytes is not None})
        if not sizes:
            self.not_tried.append("more memory: no device has a limit")
            return

        def tested(factor: float) -> Trial:
            amount = gigabytes(sizes[0] * factor) if len(sizes) == 1 else f"{factor:g} times the memory"
            return self.test(f"{amount} on every device", changes.with_memory(self.problem, factor))

        low, high = 1.0, 2.0
        best = tested(high)
        while not best.fits:
            if high >= MOST_MEMORY:
                yield best
                return
            low, high = high, 2.0 * high
            best = tested(high)
        for _ in range(3):
            middle = 0.5 * (low + high)
            found = tested(middle)
            low, high, best = (low, middle, found) if found.fits else (middle, high, best)
        yield best

    def combined(self) -> Iterator[Trial]:
        """Recomputation, smaller micro-batches and no optimizer state together: for each pair, then for all, the first fit."""
        samples = self.problem.samples_per_microbatch
        again: list[tuple[str, Segments]] = [] if self.recomputed or self.cut else self.segments()
        sizes = self.sizes() if self.at is not None else []
        state = bool((self.problem.optimizer_bytes > 0).any())
        found = list(self.first_fit([(name, segments, size, False) for size in sizes for name, segments in again]))
        yield from found
        if state:
            pairs = [("", None, size, True) for size in sizes] + [(name, segments, samples, True) for name, segments in again]
            more = list(self.first_fit(pairs))
            yield from more
            if not any(trial.fits for trial in (*found, *more)):
                yield from self.first_fit([(name, segments, size, True) for size in sizes for name, segments in again])

    def first_fit(self, ways: Sequence[tuple[str, Segments | None, int, bool]]) -> Iterator[Trial]:
        """Tries combinations of recomputation, micro-batch size and an optimizer without state; the last one is yielded."""
        samples, last = self.problem.samples_per_microbatch, None
        for name, segments, size, without in ways:
            count = samples // size * self.tester.microbatches
            parts = [name] if name else []
            parts += [f"{count} micro-batches of {size}"] if size != samples else []
            parts += ["optimizer sgd (no state)"] if without else []
            problem = self.problem if self.at is None else self.at(size)
            problem = changes.without_optimizer(problem) if without else problem
            try:
                last = self.test(" + ".join(parts), problem, microbatches=count, again=segments)
            except InputError:
                continue
            if last.fits:
                break
        if last is not None:
            yield last
