"""Whether a cluster has become slower or faster during a campaign, by plans that were timed again."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping

import numpy as np

from rlplace.measured.race import MEDIAN_LOSS, Z
from rlplace.measured.trial import Trial

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
