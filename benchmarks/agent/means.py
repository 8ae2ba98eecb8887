"""Geometric means of ratios of step times, with bootstrap intervals over cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agent.records import BenchmarkRow, CaseInfo
from rlplace.means import interval

RESAMPLES = 10_000

FLOOR = "floor"


@dataclass(frozen=True)
class Mean:
    """A geometric mean of ratios.

    Attributes:
        ratio: The mean; below 1 is faster.
        low, high: 95 % bootstrap interval; None for few ratios.
        count: Ratios behind it.
    """

    ratio: float
    low: float | None
    high: float | None
    count: int


def mean_of(logs: Sequence[float], *, seed: int = 0) -> Mean | None:
    """The mean of ratios given by their logarithms; None without any."""
    if len(logs) == 0:
        return None
    low, high = interval(logs, resamples=RESAMPLES, seed=seed)
    return Mean(math.exp(float(np.mean(logs))), low, high, len(logs))


def log_steps(rows: Iterable[BenchmarkRow], methods: Collection[str], budget: str) -> dict[str, float]:
    """Case to the mean log step time over seeds, and over methods where several are one (training seeds).

    Runs without a valid plan are left out here and counted among the violations.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.method in methods and row.budget == budget and row.valid and row.step_time_s is not None:
            found.setdefault(row.case, {}).setdefault(row.method, []).append(math.log(row.step_time_s))
    return {case: float(np.mean([np.mean(logs) for logs in per.values()])) for case, per in found.items()}


def log_floors(cases: Mapping[str, CaseInfo]) -> dict[str, float]:
    """Case to the log step time of its floor; cases without one are left out."""
    return {name: math.log(info.floor_s) for name, info in cases.items() if info.floor_s is not None}


def mean_ratio(ours: Mapping[str, float], theirs: Mapping[str, float], cases: Collection[str], *, seed: int = 0) -> Mean | None:
    """Mean of ours / theirs over the named cases that both have; None when there are none.

    Args:
        ours: Case to log step time.
        theirs: Likewise.
        cases: Names to look at.
        seed: Seed of the resampling.
    """
    logs = [ours[name] - theirs[name] for name in sorted(cases) if name in ours and name in theirs]
    return mean_of(logs, seed=seed)


def slices(cases: Mapping[str, CaseInfo]) -> dict[str, list[str]]:
    """The groups of cases that are looked at: name to case names; empty ones are left out."""
    rules: dict[str, Callable[[CaseInfo], bool]] = {
        "all": lambda info: True,
        "branchy": lambda info: info.branchy,
        "chain-like": lambda info: not info.branchy,
        "unseen clusters": lambda info: info.unseen,
    }
    named = {name: [key for key, info in cases.items() if rule(info)] for name, rule in rules.items()}
    return {name: keys for name, keys in named.items() if keys}


def families(cases: Mapping[str, CaseInfo]) -> dict[str, list[str]]:
    """Family to case names."""
    found: dict[str, list[str]] = {}
    for name, info in cases.items():
        found.setdefault(info.family, []).append(name)
    return dict(sorted(found.items()))
