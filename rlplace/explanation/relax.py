"""What would make an infeasible problem or plan fit: every suggestion is planned and simulated before it is made.

First what is missing (`rlplace.explanation.missing`). Then relaxations, one after the other: another plan, fewer samples a
step,
a smaller optimizer, finer groups, one more device or more of them, more memory. If none of those that leave the hardware alone
is enough, they are combined. What was tried and does not fit is listed with the bytes that it still lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rlplace.explanation import changes
from rlplace.explanation.missing import GROUP, NOWHERE, OTHER, TOTAL, Shortage, Tester, Trial, find_shortage, tried
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator.simulated_plan import run_unchecked
from rlplace.text import bytes_text, gb, ms, table

MOST_DEVICES = 64
"""Devices up to which more of them are tried."""

MOST_MEMORY = 8.0
"""Times the memory that is tried."""

STRATEGIES = "whole strategies recompute and shard the optimizer, too: rlplace place MODEL --batch N"

Way = tuple[str, Problem]
"""A relaxation in words, and the relaxed problem."""


@dataclass(frozen=True)
class Relaxations:
    """What is missing, and what was tried.

    Attributes:
        shortage: Why it does not fit.
        trials: In the order in which they were made.
    """

    shortage: Shortage
    trials: tuple[Trial, ...]

    @property
    def fitting(self) -> tuple[Trial, ...]:
        """Those that make it fit, least time a sample first."""
        return tuple(sorted((trial for trial in self.trials if trial.fits), key=lambda trial: trial.sample_s))

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.shortage.constraint}: {self.shortage.message}"]
        if self.shortage.proven:
            least = self.shortage.proven_bytes
            size = f"{least} bytes ({bytes_text(least)})"
            size += " on all devices together" if self.shortage.constraint == TOTAL else ""
            lines.append(f"every plan lacks at least {size}" if least else "no plan can meet it")
        if self.fitting:
            rows = [[t.relaxation, ms(t.step_time_s), str(t.samples), gb(t.peak_bytes), t.how] for t in self.fitting]
            lines += ["", *table(["makes it fit", "step ms", "samples", "peak GB", "<simulated plan"], rows)]
        else:
            lines.append("nothing that was tried makes it fit")
        failed = [trial for trial in self.trials if not trial.fits]
        if failed:
            rows = [[t.relaxation, bytes_text(t.short_bytes) if t.short_bytes else t.how] for t in failed]
            lines += ["", *table(["does not fit", "<still short"], rows)]
        return lines if self.shortage.constraint in (NOWHERE, OTHER) else [*lines, STRATEGIES]


def relax(
    problem: Problem,
    *,
    plan: PlacementPlan | None = None,
    at: Callable[[int], Problem] | None = None,
    finer: Callable[[], Problem] | None = None,
    calls: int = 256,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> Relaxations:
    """Looks for what makes a problem, or a plan, fit.

    Args:
        problem: The problem.
        plan: A plan for it that does not fit.
        at: Prices the problem for a given number of samples; None: the batch stays.
        finer: Prices it with finer groups.
        calls: Simulations of a search where the classical floor finds nothing.
        time_limit_s: Seconds of each planner.
        seed: Seed of the search.
    """
    tester = partial(tried, calls=calls, time_limit_s=time_limit_s, seed=seed)
    run = None if plan is None else run_unchecked(problem, plan)
    shortage, known = find_shortage(problem, run, tester)
    trials = [] if known is None else [known]
    if shortage.constraint != NOWHERE and not (known is not None and known.fits):  # where no memory helps, nothing is tried
        trials += _trials(problem, shortage, tester, at, finer if run is None else None)
    return Relaxations(shortage, tuple(trials))


def _trials(
    problem: Problem,
    shortage: Shortage,
    tester: Tester,
    at: Callable[[int], Problem] | None,
    finer: Callable[[], Problem] | None,
) -> Iterator[Trial]:
    """Yields all relaxations, small ones first."""
    ways = (_smaller_batches(problem, at), _smaller_optimizers(problem), _finer_groups(problem, shortage, finer))
    gentle = [trial for way in ways for trial in _first_fits(tester, way)]
    yield from gentle
    if shortage.constraint != GROUP:
        yield from _first_fits(tester, _more_devices(problem, shortage.proven_bytes))
    yield from _more_memory(problem, tester)
    if not any(trial.fits for trial in gentle) and (problem.optimizer_bytes > 0).any():
        both = _smaller_batches(problem, at)
        sparse = ((f"{name} + {_SGD}", changes.without_optimizer(smaller)) for name, smaller in both)
        yield from list(_first_fits(tester, sparse))[-1:]  # the first that fits, or the most thrifty


def _first_fits(tester: Tester, ways: Iterable[Way]) -> Iterator[Trial]:
    """Tries ways up to the first that fits."""
    for name, problem in ways:
        trial = tester(name, problem)
        yield trial
        if trial.fits:
            return


def _smaller_batches(problem: Problem, at: Callable[[int], Problem] | None) -> Iterator[Way]:
    """Divisors of the present batch, each at most half of the one before; only a model can be priced for them."""
    if at is None:
        return
    samples = last = problem.samples_per_microbatch
    for size in range(samples // 2, 0, -1):
        if samples % size == 0 and 2 * size <= last:
            last = size
            yield f"a batch of {size}", at(size)


_SGD = "optimizer sgd, no state"


def _smaller_optimizers(problem: Problem) -> Iterator[Way]:
    if (problem.optimizer_bytes > 0).any():
        if ((problem.source or {}).get("graph") or {}).get("optimizer") in ("adam", "adamw"):
            yield "optimizer momentum, half the state", changes.without_optimizer(problem, 0.5)
        yield _SGD, changes.without_optimizer(problem)


def _finer_groups(problem: Problem, shortage: Shortage, finer: Callable[[], Problem] | None) -> Iterator[Way]:
    """More groups, unless all groups together are too large."""
    together = shortage.constraint == TOTAL or (problem.num_devices == 1 and shortage.constraint != GROUP)
    if finer is not None and not together and (more := finer()).num_groups > problem.num_groups:
        yield f"{more.num_groups} groups instead of {problem.num_groups}", more


def _more_devices(problem: Problem, proven_bytes: int) -> Iterator[Way]:
    """Yields one device more, then enough to cover the proven shortage, then twice as many each time."""
    limits = problem.memory_limit_bytes
    like = int(limits.argmax())
    room = float(limits[like])
    least = math.ceil(proven_bytes / room) if math.isfinite(room) and room > 0 else 1
    larger, count, wanted = problem, 0, 1
    while problem.num_devices + wanted <= MOST_DEVICES:
        while count < wanted:
            with_one = changes.with_device(larger, like)
            if with_one is None:  # the problem does not say how a second one would be linked
                return
            larger, count = with_one, count + 1
        yield f"{count} more {'device' if count == 1 else 'devices'} like {problem.devices[like].name}", larger
        wanted = max(2 * count, least)


def _more_memory(problem: Problem, tester: Tester) -> Iterator[Trial]:
    """Twice, four or eight times the memory; once that is enough, about the least that is enough."""
    sizes = sorted({d.memory_bytes for d in problem.devices if d.memory_bytes is not None})
    if not sizes:
        return

    def tested(factor: float) -> Trial:
        amount = bytes_text(sizes[0] * factor) if len(sizes) == 1 else f"{factor:g} times the memory"
        return tester(f"{amount} on every device", changes.with_memory(problem, factor))

    low, high = 1.0, 2.0
    best = tested(high)
    while not best.fits and high < MOST_MEMORY:
        low, high = high, 2.0 * high
        best = tested(high)
    for _ in range(3 if best.fits else 0):
        middle = 0.5 * (low + high)
        relaxed = tested(middle)
        if relaxed.fits:
            high, best = middle, relaxed
        else:
            low = middle
    yield best
