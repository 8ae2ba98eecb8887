"""`compiler`: the static partition as a planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlplace.plan import PlacementPlan
from rlplace.planners.compiler.partition import partition
from rlplace.planners.evaluate import Assignment
from rlplace.planners.floor import one_shot
from rlplace.planners.subsets import device_subsets
from rlplace.problem import Problem

BALANCES = ((1, 0.05), (1, 0.3), (4, 0.1), (16, 0.3))
"""Bands and allowed imbalance of the candidates."""

LARGE_GROUPS = 1000
"""Groups above which candidates use a quarter, half and all of the devices only."""


def compiler(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, **execution: Any) -> PlacementPlan:
    """The best of the partitions; see the docstring of `rlplace.planners.compiler`."""
    return one_shot(problem, "compiler", candidates, seed=seed, time_limit_s=time_limit_s, **execution)


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Partitions for several numbers of devices, bands and allowed imbalances."""
    subsets = list(reversed(device_subsets(problem, least=min(2, problem.num_devices))))
    if problem.num_groups > LARGE_GROUPS:
        wanted = {len(subsets[0]), len(subsets[0]) // 2, len(subsets[0]) // 4}
        subsets = [subset for subset in subsets if len(subset) in wanted] or subsets[:1]
    for subset in subsets:
        for bands, eps in BALANCES:
            yield partition(problem, subset, eps=eps, bands=bands, seed=seed).device_of_group
