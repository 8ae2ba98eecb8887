"""How often a plan is timed: slow plans are given up as soon as it is clear that they are slow.

Step times scatter by some per cent, and measuring costs real time, so candidates race against the best plan known: after every
step the lower confidence bound of the candidate's median is compared with the best plan's upper bound (successive elimination;
Even-Dar, Mannor and Mansour, 2006, with a normal bound on relative noise instead of Hoeffding's, since step times are not
bounded). A plan that is dropped keeps the times that it has: they still teach the cost model.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.errors import whole_number
from rlplace.measured.trial import Trial

Z = 2.5
"""Standard errors of the bounds: a plan that is as fast as the best one is dropped in about one of a hundred comparisons."""

FIRST_NOISE = 0.05
"""Relative scatter of single steps that is assumed before any was measured."""

_LEAST_NOISE = 0.005

MEDIAN_LOSS = 1.2533
"""The median of many normal values scatters so much more than their mean: sqrt(pi / 2)."""


@dataclass(frozen=True)
class Race:
    """When to stop timing a plan.

    Attributes:
        repeats: Steps of a plan that is not dropped.
        best_s: Upper bound of the best plan's median step time; inf when there is none.
        noise: Relative standard deviation of single steps.
    """

    repeats: int = 5
    best_s: float = math.inf
    noise: float = FIRST_NOISE

    def __post_init__(self) -> None:
        whole_number(self.repeats, "race: repeats", 1)

    def lost(self, step_s: Sequence[float]) -> bool:
        """Whether these steps are slower than the best plan's beyond doubt."""
        return bool(step_s) and lower_bound(step_s, self.noise) > self.best_s

    def over(self, step_s: Sequence[float]) -> bool:
        """Whether no further step is needed."""
        return len(step_s) >= self.repeats or self.lost(step_s)


def _error(count: int, noise: float) -> float:
    return Z * noise * (MEDIAN_LOSS if count > 2 else 1.0) / math.sqrt(count)


def lower_bound(step_s: Sequence[float], noise: float) -> float:
    """Lower confidence bound of the median step time."""
    return statistics.median(step_s) * max(0.0, 1.0 - _error(len(step_s), noise))


def upper_bound(step_s: Sequence[float], noise: float) -> float:
    """Upper confidence bound of the median step time."""
    return statistics.median(step_s) * (1.0 + _error(len(step_s), noise))


def pooled_noise(timed: Sequence[Sequence[float]]) -> float:
    """Relative standard deviation of single steps, from several plans' steps; `FIRST_NOISE` where nothing tells.

    Deviations from each plan's median are pooled and their median taken, so that a few disturbed steps count for nothing.
    """
    deviations: list[float] = []
    for steps in timed:
        if len(steps) > 2:
            middle = statistics.median(steps)
            own = sorted(abs(step / middle - 1.0) for step in steps)
            deviations += own[1:]  # the median step itself deviates by nothing
    if len(deviations) < 4:
        return FIRST_NOISE
    return max(_LEAST_NOISE, 1.4826 * statistics.median(deviations))


Levels = list[tuple[float, float]]
"""(moment, log of the slowdown since the beginning), by moment; empty where nothing was timed again."""


def pace_levels(trials: Iterable[Trial], by_plan: Mapping[tuple[int, ...], Trial], noise: float) -> Levels:
    """Levels from every plan that was timed again.

    A plan's earlier times stand at the level that the anchors before them had found, so a chain of changing best plans
    tells the drift of the whole campaign. Plans that were first timed while the cluster changed tell nothing: nobody knows
    whether that was before the change or after it. An anchor that agrees with a known level within doubt is at that level.
    The first time of a plan is doubted more: it is timed again because that time was good, some of which was luck.

    Args:
        trials: All trials of the campaign.
        by_plan: The first trial of every plan.
        noise: Relative standard deviation of single steps.
    """
    luck = math.sqrt(2.0 * math.log(max(2, len(by_plan))))  # of the luckiest of so many, in standard deviations
    levels: Levels = []
    earlier: dict[tuple[int, ...], list[Trial]] = {}
    for anchor in sorted((t for t in trials if t.anchor and t.timed), key=lambda t: t.began_at):
        first = by_plan.get(anchor.device_of_group)
        if first is None or not first.timed or first.began_at >= anchor.began_at:
            continue
        if not settled(levels, first.began_at, noise):
            continue
        if not levels:
            levels.append((first.began_at, 0.0))
        before = earlier.setdefault(anchor.device_of_group, [first])
        steps = [math.log(step) - level_at(levels, trial.began_at) for trial in before for step in trial.step_s]
        value = math.log(anchor.median_s) - float(np.median(steps))
        doubt = MEDIAN_LOSS * noise * Z * math.sqrt(1 / len(anchor.step_s) + 1 / len(steps))
        lucky = MEDIAN_LOSS * noise * luck * math.sqrt(len(first.step_s)) / len(steps)
        near = min((level for _, level in levels), key=lambda level: abs(value - level))
        levels.append((anchor.began_at, near if -doubt <= value - near <= doubt + lucky else value))
        before.append(anchor)
    return levels


def level_at(levels: Levels, moment: float) -> float:
    """Log of the slowdown at a moment."""
    at, log_ratio = zip(*levels, strict=True)
    return float(np.interp(moment, at, log_ratio))


def settled(levels: Levels, moment: float, noise: float) -> bool:
    """Whether the cluster was as fast at the anchor before a moment as at the one after it."""
    later = bisect.bisect_left(levels, (moment,))
    return later in (0, len(levels)) or abs(levels[later][1] - levels[later - 1][1]) <= Z * noise
