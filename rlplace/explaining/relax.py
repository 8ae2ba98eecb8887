"""What would make an infeasible problem or plan fit: every suggestion is planned and simulated before it is made.

First what is missing (`rlplace.explaining.missing`). Then relaxations, one after the other: another plan, fewer samples a
micro-batch (as many more of them, so that the step processes the same), a smaller optimizer, finer groups, one more device or
more of them, more memory. If none of those that leave the hardware alone is enough, they are combined. What was tried and does
not fit is listed with the bytes that it still lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.errors import InputError
from rlplace.explaining import changes
from rlplace.explaining.missing import GROUP, NOWHERE, TOTAL, Shortage, Tester, Trial, find_shortage
from rlplace.explaining.simulated_plan import SimulatedPlan, run_unchecked
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.schedule import LIST
from rlplace.text import bytes_text, gb, ms, table

MOST_DEVICES = 64
"""Devices up to which more of them are tried."""

MOST_MEMORY = 8.0
"""Times the memory that is tried."""


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
        """Those that make it fit, least time a sample first."""
        return tuple(sorted((trial for trial in self.trials if trial.fits), key=lambda trial: trial.sample_s))

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.shortage.constraint}: {self.shortage.message}"]
        if self.shortage.proven:
            least = self.shortage.proven_bytes
            lines.append(f"every plan lacks at least {least} bytes ({bytes_text(least)})" if least else "no plan can meet it")
        if self.fitting:
            rows = [[t.relaxation, ms(t.step_time_s), str(t.samples), gb(t.peak_bytes), t.how] for t in self.fitting]
            lines += ["", *table(["makes it fit", "step ms", "samples", "peak GB", "<simulated plan"], rows)]
        else:
            lines.append("nothing that was tried makes it fit")
        failed = [trial for trial in self.trials if not trial.fits]
        if failed:
            rows = [[t.relaxation, bytes_text(t.short_bytes) if t.short_bytes else t.how] for t in failed]
            lines += ["", *table(["does not fit", "<still short"], rows)]
        return [*lines, *(f"not tried: {line}" for line in self.not_tried)]


def relax(
    problem: Problem,
    *,
    plan: PlacementPlan | None = None,
    at: Callable[[int], Problem] | None = None,
    finer: Callable[[], Problem] | None = None,
    microbatches: int = 1,
    schedule: str = LIST,
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
        microbatches: Micro-batches of the execution that does not fit.
        schedule: Its schedule.
        calls: Simulations of a search where the classical floor finds nothing.
        time_limit_s: Seconds of each planner.
        seed: Seed of the search.
    """
    if plan is not None:
        microbatches, schedule = plan.microbatches, plan.schedule
    tester = Tester(calls, time_limit_s, seed, microbatches, schedule)
    run = None if plan is None else run_unchecked(problem, plan)
    shortage, known = find_shortage(problem, run, tester)
    work = _Relaxing(problem, run, at, finer, tester)
    trials = list(work.trials(shortage, known))
    return Relaxations(shortage, tuple(trials), tuple(work.not_tried))


class _Relaxing:
    """Makes the trials."""

    def __init__(
        self,
        problem: Problem,
        run: SimulatedPlan | None,
        at: Callable[[int], Problem] | None,
        finer: Callable[[], Problem] | None,
        tester: Tester,
    ) -> None:
        self.problem, self.run, self.at, self.finer, self.tester = problem, run, at, finer, tester
        self.not_tried: list[str] = []

    def test(self, name: str, problem: Problem, *, microbatches: int | None = None) -> Trial | None:
        """A new plan of a changed problem; None: cannot be done."""
        try:
            return self.tester.plan(name, problem, microbatches=microbatches)
        except InputError as error:  # too many tasks
            self.not_tried.append(f"{name}: {error}")
            return None

    def trials(self, shortage: Shortage, known: Trial | None) -> Iterator[Trial]:
        """All of them, the gentle ones first; none is needed where another plan fits as things are."""
        if self.run is not None and not shortage.proven:
            known = self.tester.plan("another plan", self.problem)
        if known is not None:
            yield known
            if known.fits:
                return
        if shortage.constraint == NOWHERE:
            self.not_tried.append("anything that frees memory, which is not what is missing")
            return
        self.not_tried.append(
            "recomputation and a sharded optimizer, which whole strategies choose: rlplace place MODEL --batch N"
        )
        gentle = [*self.fewer_samples(), *self.optimizer(), *self.finer_groups(shortage)]
        yield from gentle
        yield from self.devices(shortage)
        yield from self.memory()
        if not any(trial.fits for trial in gentle):
            yield from self.combined()

    def sizes(self) -> list[int]:
        """Smaller micro-batches that divide the present one, each at most half of the one before."""
        samples = self.problem.samples_per_microbatch
        kept = [samples]
        for size in range(samples // 2, 0, -1):
            if samples % size == 0 and 2 * size <= kept[-1]:
                kept.append(size)
        return kept[1:]

    def fewer_samples(self) -> Iterator[Trial]:
        if self.at is None:
            self.not_tried.append("fewer samples a micro-batch, which needs the model; name it instead of a problem file")
        elif not self.sizes():
            self.not_tried.append("fewer samples a micro-batch, which has one already")
        else:
            yield from self.first_fits([(size, False) for size in self.sizes()])

    def optimizer(self) -> Iterator[Trial]:
        if int(np.maximum(self.problem.optimizer_bytes, 0).sum()) == 0:
            self.not_tried.append("a smaller optimizer: the problem names no optimizer state")
            return
        now = ((self.problem.source or {}).get("graph") or {}).get("optimizer")
        smaller = [("optimizer momentum, half the state", 0.5)] if now in ("adam", "adamw") else []
        for name, keep in [*smaller, ("optimizer sgd, no state", 0.0)]:
            trial = self.test(name, changes.without_optimizer(self.problem, keep))
            if trial is not None:
                yield trial
                if trial.fits:
                    return

    def finer_groups(self, shortage: Shortage) -> Iterator[Trial]:
        if self.finer is None or self.run is not None:
            return
        if shortage.constraint == TOTAL or (self.problem.num_devices == 1 and shortage.constraint != GROUP):
            self.not_tried.append("finer groups: all groups together are too large")
            return
        problem = self.finer()
        if problem.num_groups > self.problem.num_groups:
            yield self.tester.plan(f"{problem.num_groups} groups instead of {self.problem.num_groups}", problem)

    def devices(self, shortage: Shortage) -> Iterator[Trial]:
        if shortage.constraint == GROUP:
            self.not_tried.append("one more device: a group alone is too large for every device")
            return
        limits = self.problem.memory_limit_bytes
        like = int(limits.argmax())
        room = float(limits[like])
        least = math.ceil(shortage.proven_bytes / room) if math.isfinite(room) and room > 0 else 1
        problem, count, wanted = self.problem, 0, 1
        if problem.num_devices >= MOST_DEVICES:
            self.not_tried.append(f"one more device: only up to {MOST_DEVICES} are tried")
        while problem.num_devices + (wanted - count) <= MOST_DEVICES:
            while count < wanted:
                larger = changes.with_device(problem, like)
                if larger is None:
                    self.not_tried.append("one more device: the problem does not say how a second one would be linked")
                    return
                problem, count = larger, count + 1
            noun = "device" if count == 1 else "devices"
            trial = self.test(f"{count} more {noun} like {self.problem.devices[like].name}", problem)
            if trial is None:
                return
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

        def tested(factor: float) -> Trial | None:
            amount = bytes_text(sizes[0] * factor) if len(sizes) == 1 else f"{factor:g} times the memory"
            return self.test(f"{amount} on every device", changes.with_memory(self.problem, factor))

        low, high = 1.0, 2.0
        best = tested(high)
        while best is not None and not best.fits and high < MOST_MEMORY:
            low, high = high, 2.0 * high
            best = tested(high)
        for _ in range(3 if best is not None and best.fits else 0):
            middle = 0.5 * (low + high)
            relaxed = tested(middle)
            if relaxed is not None and relaxed.fits:
                high, best = middle, relaxed
            else:
                low = middle
        if best is not None:
            yield best

    def combined(self) -> Iterator[Trial]:
        """Smaller micro-batches and no optimizer state together: the first that fits, or the most thrifty."""
        if self.at is not None and (self.problem.optimizer_bytes > 0).any():
            yield from list(self.first_fits([(size, True) for size in self.sizes()]))[-1:]

    def first_fits(self, ways: Sequence[tuple[int, bool]]) -> Iterator[Trial]:
        """Tries (micro-batch size, whether to drop the optimizer state) up to the first that fits."""
        samples = self.problem.samples_per_microbatch
        for size, without in ways:
            count = samples // size * self.tester.microbatches
            problem = self.problem if size == samples or self.at is None else self.at(size)
            parts = [f"{count} micro-batches of {size}"] if size != samples else []
            parts += ["optimizer sgd, no state"] if without else []
            problem = changes.without_optimizer(problem) if without else problem
            trial = self.test(" + ".join(parts), problem, microbatches=None if size == samples else count)
            if trial is not None:
                yield trial
                if trial.fits:
                    return
