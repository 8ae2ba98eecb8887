"""`compiler`: the static partition as a planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlplace.errors import InfeasibleError
from rlplace.plan import PlacementPlan
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.floor import one_shot
from rlplace.planners.common.subsets import device_subsets
from rlplace.planners.compiler.partition import partition
from rlplace.problem import Problem

LARGE_GROUPS = 1000
"""Groups above which there are fewer candidates, and no starts grown from the coarsest level."""

MOST_SUBSETS = 4
"""Numbers of devices that are tried; where there are more, all devices and then half as many each time."""


def compiler(
    problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, stages: bool = False, **execution: Any
) -> PlacementPlan:
    """The best of the partitions; see the docstring of `rlplace.planners.compiler`.

    Args:
        problem: The priced graph.
        seed: Decides the order in which groups are fused.
        time_limit_s: When to stop building candidates.
        stages: Devices form a pipeline: forward ops read from earlier stages only. The shared memory repair, which runs only
            where no partition fits, does not know stages.
        execution: Fields of `rlplace.planners.common.evaluate.Execution`.
    """

    def build(problem: Problem, seed: int) -> Iterator[Assignment]:
        return candidates(problem, seed, stages=stages)

    return one_shot(problem, "compiler", build, seed=seed, time_limit_s=time_limit_s, **execution)


def candidates(problem: Problem, seed: int, *, stages: bool = False) -> Iterator[Assignment]:
    """Partitions for several numbers of devices, bands and allowed imbalances."""
    subsets = list(reversed(device_subsets(problem)))
    if problem.num_groups > LARGE_GROUPS or len(subsets) > MOST_SUBSETS:
        times = 2 if problem.num_groups > LARGE_GROUPS else MOST_SUBSETS
        wanted = {len(subsets[0]) >> halved for halved in range(times)}
        subsets = [subset for subset in subsets if len(subset) in wanted]
    for subset in subsets:
        yield from family(problem, subset, seed=seed, stages=stages)


def family(problem: Problem, devices: Sequence[int], *, stages: bool = False, seed: int = 0) -> Iterator[Assignment]:
    """Partitions on given devices that differ in bands and allowed imbalance; arguments as those of `partition`."""
    starts = 0 if problem.num_groups > LARGE_GROUPS else 2
    for bands, eps in ((1, 0.05), (1, 0.3)) if stages else balances(problem.num_groups, len(devices)):
        try:
            yield partition(problem, devices, eps=eps, bands=bands, stages=stages, seed=seed, starts=starts).device_of_group
        except InfeasibleError:  # these devices cannot be stages in this order; others may
            return
        if len(devices) == 1:
            return


def balances(groups: int, devices: int) -> list[tuple[int, float]]:
    """Bands and allowed imbalances to try: from totals only to bands of about three groups a device."""
    finest = max(1, groups // (3 * devices))
    quarter, middle = max(1, finest // 4), max(1, finest // 2)
    pairs = [(1, 0.05), (4, 0.1), (4, 0.3), (8, 0.2), (quarter, 0.3), (middle, 0.1), (finest, 0.2), (finest, 0.5)]
    if groups > LARGE_GROUPS:
        pairs = [(1, 0.05), (middle, 0.2), (finest, 0.2), (finest, 0.5)]
    return list(dict.fromkeys(pair for pair in pairs if pair[0] <= finest))
