"""`compiler`: the static partition as a planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.subsets import device_subsets
from rlplace.placement.published.compiler.partition import partition
from rlplace.problem import Problem

LARGE_GROUPS = 1000
"""Groups above which there are fewer candidates, and no starts grown from the coarsest level."""

MOST_SUBSETS = 4
"""Numbers of devices that are tried; where there are more, all devices and then half as many each time."""


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Partitions for several numbers of devices, bands and allowed imbalances."""
    subsets = list(reversed(device_subsets(problem)))
    if problem.num_groups > LARGE_GROUPS or len(subsets) > MOST_SUBSETS:
        times = 2 if problem.num_groups > LARGE_GROUPS else MOST_SUBSETS
        wanted = {len(subsets[0]) >> halved for halved in range(times)}
        subsets = [subset for subset in subsets if len(subset) in wanted]
    for subset in subsets:
        yield from family(problem, subset, seed=seed)


def family(problem: Problem, devices: Sequence[int], *, seed: int = 0) -> Iterator[Assignment]:
    """Partitions on given devices that differ in bands and allowed imbalance; takes the arguments of `partition`."""
    starts = 0 if problem.num_groups > LARGE_GROUPS else 2
    for bands, eps in balances(problem.num_groups, len(devices)):
        yield partition(problem, devices, eps=eps, bands=bands, seed=seed, starts=starts).device_of_group
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
