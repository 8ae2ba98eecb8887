"""Changes that make an infeasible problem or plan fit: every suggestion is planned and simulated before it is made.

First the shortage: the constraint that fails, its device and the missing bytes. Then relaxations, one after the other: another
plan, fewer samples a step, a smaller optimizer, finer groups, one more device or more of them, more memory. If none of those
that leave the hardware alone is enough, they are combined. Relaxations that do not fit are listed with the bytes still missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError
from rlplace.explanation import changes
from rlplace.placement import get_planner
from rlplace.placement.common.bounds import lower_bounds
from rlplace.placement.common.shortage import check_possible
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator import simulate
from rlplace.simulator.simulated_plan import SimulatedPlan, run_unchecked
from rlplace.text import bytes_text, gb, ms, table

MOST_DEVICES = 64
"""Devices up to which more of them are tried."""

MOST_MEMORY = 8.0
"""Times the memory that is tried."""

STRATEGIES = "whole strategies recompute and shard the optimizer, too: rlplace place MODEL --batch N"

TOTAL, GROUP, FIXED, NOWHERE, DEVICE, OTHER = (
    "total memory", "largest group", "fixed groups", "no device", "device memory", "times or links",
)  # fmt: skip
"""Constraints: all devices together are too small; the largest device is for one group; a device is for the groups fixed to
it; a group may sit nowhere; a device is too small in the plan, or in every plan that was found; ops sit where they cannot run,
or a link is missing."""


@dataclass(frozen=True)
class Relaxation:
    """One relaxation, planned and simulated.

    Attributes:
        relaxation: In words.
        fits: Whether a plan was found that completes and fits.
        step_time_s: Step time of that plan, else None.
        samples: Samples of its step.
        peak_bytes: Peak memory of its fullest device, else 0.
        short_bytes: Bytes still missing when it does not fit: in the closest plan, or proven.
        how: Planner of the plan that fits, or why none does.
    """

    relaxation: str
    fits: bool
    step_time_s: float | None
    samples: int
    peak_bytes: int
    short_bytes: int
    how: str

    @property
    def sample_s(self) -> float:
        """Seconds a sample; inf when it does not fit."""
        return float("inf") if self.step_time_s is None else self.step_time_s / max(self.samples, 1)


@dataclass(frozen=True)
class Shortage:
    """The constraint that fails.

    Attributes:
        constraint: Its name: `TOTAL`, `GROUP`, `FIXED`, `NOWHERE`, `DEVICE` or `OTHER`.
        message: The constraint, its device and the missing bytes in words.
        device: The device that is short; None for all of them together, or for another constraint.
        short_bytes: Missing in the plan, or in the closest plan that was found; without a plan `proven_bytes`.
        proven_bytes: Missing in every plan: total demand over total capacity, or the largest group over the largest device; 0
            when no bound says that there is no plan.
        proven: No plan of the problem fits, whatever its devices.
    """

    constraint: str
    message: str
    device: str | None
    short_bytes: int
    proven_bytes: int
    proven: bool


Tester = Callable[[str, Problem], Relaxation]
"""Plans a relaxed problem, under a budget."""

Way = tuple[str, Problem]
"""A relaxation in words, and the relaxed problem."""


@dataclass(frozen=True)
class Relaxations:
    """A shortage, and the relaxations that were tried.

    Attributes:
        shortage: Why it does not fit.
        trials: In the order in which they were made.
    """

    shortage: Shortage
    trials: tuple[Relaxation, ...]

    @property
    def fitting(self) -> tuple[Relaxation, ...]:
        """Relaxations that make it fit, least time a sample first."""
        return tuple(sorted((trial for trial in self.trials if trial.fits), key=lambda trial: trial.sample_s))

    def lines(self) -> list[str]:
        """Returns the shortage, and tables of relaxations that fit and of those that do not."""
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
    """Searches for changes that make a problem, or a plan, fit.

    Args:
        problem: The problem.
        plan: A plan for it that does not fit.
        at: Prices the problem for a given number of samples; None: the batch stays.
        finer: Prices it with finer groups.
        calls: Simulations of a search where the classical floor finds nothing.
        time_limit_s: Seconds of each planner.
        seed: Seed of the search.
    """
    tester = partial(_tried, calls=calls, time_limit_s=time_limit_s, seed=seed)
    shortage, known = _shortage(problem, None if plan is None else run_unchecked(problem, plan), tester)
    trials = [] if known is None else [known]
    if shortage.constraint != NOWHERE and not (known is not None and known.fits):  # where no memory helps, nothing is tried
        trials += _trials(problem, shortage, tester, at, finer if plan is None else None)
    return Relaxations(shortage, tuple(trials))


def _tried(name: str, problem: Problem, *, calls: int, **limits: Any) -> Relaxation:
    """Returns the best plan of a changed problem by the floor, else, with `calls`, by a search of so many simulations."""
    samples = problem.samples_per_microbatch
    errors: list[InfeasibleError] = []
    for planner, extra in (("best", {}), *((("annealing", {"calls": calls}),) if calls else ())):
        try:
            plan = get_planner(planner)(problem, **limits, **extra)
        except InfeasibleError as error:
            errors.append(error)
            continue
        peak = max(plan.predicted.peak_memory_bytes)
        return Relaxation(name, True, plan.predicted.step_s, samples, peak, 0, f"planner {planner}")
    closest = errors[-1] if 0 < errors[-1].short_bytes < errors[0].short_bytes else errors[0]
    short_bytes = shortage_of_only_plan(problem) or closest.short_bytes
    return Relaxation(name, False, None, samples, 0, short_bytes, _without_advice(closest))


def shortage_of_only_plan(problem: Problem) -> int | None:
    """Returns bytes that a problem's single device lacks; None with several devices, or where memory is enough."""
    limit = problem.devices[0].memory_bytes
    if problem.num_devices > 1 or limit is None or not problem.group_allowed.all():
        return None
    line = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32))
    short = int(line.peak_memory_bytes[0]) - limit
    return short if line.step_time_s is not None and short > 0 else None


def _without_advice(error: InfeasibleError) -> str:
    """Returns the message without its advice: advice given here is tested first."""
    return str(error).partition("; ")[0]


def _shortage(problem: Problem, run: SimulatedPlan | None, tester: Tester) -> tuple[Shortage, Relaxation | None]:
    """Returns the shortage of a problem, or of a plan that does not fit; and another plan, searched where one may exist."""
    constraint, error, proven = _proof(problem)
    if run is not None:
        over = np.maximum(run.line.peak_memory_bytes - problem.capacity_bytes, 0.0)
        short = int(over.max())
        message = f"the plan does not fit: {'; '.join(run.line.violations)}"
        name = problem.devices[int(over.argmax())].name if short else None
        shortage = Shortage(DEVICE if short else OTHER, message, name, short, proven, error is not None)
        return shortage, tester("another plan", problem) if error is None else None
    only, first = shortage_of_only_plan(problem), problem.devices[0]
    if only is not None:  # there is one plan, so its shortage is exact
        limit = first.memory_bytes or 0
        message = f"{first.name} needs {bytes_text(limit + only)}, has {bytes_text(limit)}: {only} bytes short"
        message = message if error is None else _without_advice(error)
        return Shortage(constraint or DEVICE, message, first.name, only, only, True), None
    if error is not None:
        return Shortage(constraint, _without_advice(error), error.device, proven, proven, True), None
    trial = tester("another plan", problem)
    message = f"a plan that fits was found by {trial.how}" if trial.fits else trial.how
    return Shortage(DEVICE, message, None, trial.short_bytes, 0, False), trial


def _proof(problem: Problem) -> tuple[str, InfeasibleError | None, int]:
    """Returns the constraint that no plan can meet, its error, and the bytes that every plan lacks; no error where none is
    proven.
    """
    try:
        check_possible(problem)
    except InfeasibleError as error:
        if not problem.group_allowed.any(axis=1).all():
            return NOWHERE, error, 0
        bounds = lower_bounds(problem)
        total = bounds.resident_bytes + bounds.live_bytes - bounds.capacity_bytes
        short = max(error.short_bytes, int(total) if math.isfinite(total) else 0)
        if error.device is None:
            return TOTAL, error, short
        device = next(d for d, item in enumerate(problem.devices) if item.name == error.device)
        fixed = int(problem.resident_bytes[problem.group_device == device].sum())
        return FIXED if fixed > problem.memory_limit_bytes[device] else GROUP, error, short
    return "", None, 0


def _trials(
    problem: Problem,
    shortage: Shortage,
    tester: Tester,
    at: Callable[[int], Problem] | None,
    finer: Callable[[], Problem] | None,
) -> Iterator[Relaxation]:
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


def _first_fits(tester: Tester, ways: Iterable[Way]) -> Iterator[Relaxation]:
    """Tries ways up to the first that fits."""
    for name, problem in ways:
        trial = tester(name, problem)
        yield trial
        if trial.fits:
            return


def _smaller_batches(problem: Problem, at: Callable[[int], Problem] | None) -> Iterator[Way]:
    """Yields divisors of the present batch, each at most half of the one before; only a model can be priced for them."""
    samples = last = problem.samples_per_microbatch
    for size in range(samples // 2, 0, -1) if at is not None else ():
        if samples % size == 0 and 2 * size <= last:
            last = size
            assert at is not None
            yield f"a batch of {size}", at(size)


_SGD = "optimizer sgd, no state"


def _smaller_optimizers(problem: Problem) -> Iterator[Way]:
    if (problem.optimizer_bytes > 0).any():
        if ((problem.source or {}).get("graph") or {}).get("optimizer") in ("adam", "adamw"):
            yield "optimizer momentum, half the state", changes.without_optimizer(problem, 0.5)
        yield _SGD, changes.without_optimizer(problem)


def _finer_groups(problem: Problem, shortage: Shortage, finer: Callable[[], Problem] | None) -> Iterator[Way]:
    """Yields more groups, unless all groups together are too large."""
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


def _more_memory(problem: Problem, tester: Tester) -> Iterator[Relaxation]:
    """Tries twice, four or eight times the memory; once that is enough, yields about the least that is enough."""
    sizes = sorted({d.memory_bytes for d in problem.devices if d.memory_bytes is not None})
    if not sizes:
        return

    def tested(factor: float) -> Relaxation:
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
