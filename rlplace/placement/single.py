"""Everything on one device: the fastest one on which the model fits.

Groups that are fixed elsewhere, or cannot run on the device, go to the nearest device that may hold them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_classes
from rlplace.problem import Problem

REPAIRS = 0
"""No repairs: a repaired plan would use several devices."""


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields one assignment per class of like devices, or per device when there are few."""
    del seed
    free = problem.group_device < 0
    for members in device_classes(problem):
        # Like devices differ in their links at most, which matters only beside groups that sit elsewhere.
        for device in members if not free.all() else members[:1]:
            yield np.full(problem.num_groups, device, dtype=np.int32)
