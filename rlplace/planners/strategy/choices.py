"""The ways to run a step: how many replicas, on which devices, in how many micro-batches of how many samples."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlplace.planners.common.subsets import device_classes
from rlplace.problem import Problem
from rlplace.simulator.replicas import gradient_edges

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of micro-batches that are tried; where one does not divide the batch, the next larger one that does."""

MORE_MICROBATCHES = (128, 256, 512, 1024)
"""The same, for when none of the others fits."""

MAX_GLOBAL_BATCH = 1 << 24
"""Samples that a step may have."""


@dataclass(frozen=True)
class StageLayout:
    """Replicas on devices.

    Attributes:
        rows: Per replica the devices that it may use.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Devices that one replica may use."""
        return len(self.rows[0])


@dataclass(frozen=True)
class Strategy:
    """One way to run a step.

    Attributes:
        layout: Replicas on devices.
        microbatches: M, of each replica.
        samples: Samples of one micro-batch.
    """

    layout: StageLayout
    microbatches: int
    samples: int

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.layout.replicas * self.microbatches * self.samples


def kind_of(replicas: int, used: int, microbatches: int) -> str:
    """The usual name of a strategy whose replicas use so many devices each."""
    inner = "model parallel" if microbatches == 1 else "pipeline"
    if replicas == 1:
        return "single device" if used == 1 else inner
    return "data parallel" if used == 1 else f"data parallel x {inner}"


def layouts(problem: Problem) -> list[StageLayout]:
    """One device, all devices, and every number of replicas on equal blocks of consecutive devices.

    Replicas are copies, so their blocks must look alike: any block of like devices will do, and of unlike devices blocks with
    the same sequence of kinds, or of one device each (the slowest then sets the pace, which the simulator sees). Every block
    must be able to run every group. A problem with fixed groups, or one that does not say how large its gradients are, has
    one replica.
    """
    everything = tuple(range(problem.num_devices))
    layouts_found = {StageLayout((everything,)): None}
    # The first device stands for any: with one replica on one device the planner `single` looks at all of them.
    layouts_found[StageLayout(((0,),))] = None
    if (problem.group_device >= 0).any() or not exchanges_gradients(problem):
        return list(layouts_found)
    classes = device_classes(problem)
    kind = {device: index for index, members in enumerate(classes) for device in members}
    for members in ([list(everything)] if len(classes) > 1 else []) + classes:
        for replicas in range(2, len(members) + 1):
            width = len(members) // replicas
            rows = tuple(tuple(members[r * width : (r + 1) * width]) for r in range(replicas))
            alike = width == 1 or len({tuple(kind[device] for device in row) for row in rows}) == 1
            if alike and all(problem.group_allowed[:, row].any(axis=1).all() for row in rows):
                layouts_found[StageLayout(rows)] = None
    return list(layouts_found)


def exchanges_gradients(problem: Problem) -> bool:
    """Whether replicas of the problem could exchange gradients: it says how large those are, or updates nothing."""
    updated = problem.op_group[problem.consumers[gradient_edges(problem)]]
    return bool((problem.gradient_bytes[updated] >= 0).all())


def strategies(
    layout: StageLayout, share: int, *, samples: int | None = None, microbatches: tuple[int, ...] = MICROBATCHES
) -> Iterator[Strategy]:
    """All ways to split the samples of a replica into micro-batches that are tried.

    Args:
        layout: Replicas on devices.
        share: Samples of one replica.
        samples: The only micro-batch size there is; None where any can be priced.
        microbatches: See `MICROBATCHES`.
    """
    if samples is not None:
        counts = set() if share % samples else {share // samples}
    else:
        known = divisors(share)
        at = {bisect.bisect_left(known, number) for number in microbatches}
        counts = {known[i] for i in at if i < len(known) and known[i] <= microbatches[-1]}
    for count in sorted(counts):
        yield Strategy(layout, count, share // count)


def divisors(number: int) -> list[int]:
    """The divisors of a number, in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
