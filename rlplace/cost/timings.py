"""`PlanTimings`: measured times of whole plans on real devices, beside the simulator's predictions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from rlplace.errors import InputError
from rlplace.files import read_record, write_json
from rlplace.records import Record, Whole, build, plain

FORMAT = "rlplace.plan_timings"
VERSION = 1
Seconds = Annotated[float, Meta(ge=0, lt=1e18)]


class PlaceTiming(Record, frozen=True):
    """One device during the median step, in seconds; the rest of the step is idle or not accounted for.

    Attributes:
        rank: Rank of its process.
        host: Name of its machine.
        busy_s: Forward and backward passes.
        wait_s: Waiting for other processes.
        update_s: Optimizer updates.
        peak_memory_bytes: Largest allocation of the device in any step; None where the device does not report it.
        predicted_busy_s: Simulated time of passes and updates.
        predicted_peak_bytes: Simulated peak memory.
    """

    rank: Whole
    host: str
    busy_s: Seconds
    wait_s: Seconds
    update_s: Seconds
    peak_memory_bytes: Whole | None = None
    predicted_busy_s: Seconds | None = None
    predicted_peak_bytes: Whole | None = None


def spread_of(step_s: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for fewer than four steps."""
    if len(step_s) < 4:
        return 0.0
    low, _, high = statistics.quantiles(step_s, n=4)
    return (high - low) / statistics.median(step_s)


class PlanTiming(Record, frozen=True):
    """The timed steps of one plan.

    Attributes:
        name: For people, such as the plan's file name.
        plan: Fingerprint of the plan.
        problem: Fingerprint of its problem.
        planner: Name of its planner.
        engine: Name of the engine that ran it.
        step_s: Seconds of every timed step, warm-up left out: the slowest process counts.
        places: One entry a process that the plan uses, by rank.
        setup_s: Time from the plan to the first step.
        predicted_s: Simulated step time; None without the problem.
        peak_memory_bytes: By process that the plan uses, the largest allocation in any step; None where the device is silent.
        pace_s: Likewise, seconds of a matrix product that is the same on all, while all take it.
        stage_busy_s: By stage of a pipeline, seconds of its passes in one more step, on the slowest process; empty otherwise.
    """

    name: str
    plan: str
    problem: str
    planner: str
    engine: str
    step_s: Annotated[tuple[Annotated[float, Meta(gt=0, lt=1e18)], ...], Meta(min_length=1)]
    places: tuple[PlaceTiming, ...]
    setup_s: Seconds
    predicted_s: Seconds | None = None
    peak_memory_bytes: tuple[Whole | None, ...] = ()
    pace_s: tuple[Annotated[float, Meta(gt=0, lt=1e18)], ...] = ()
    stage_busy_s: tuple[Annotated[float, Meta(gt=0, lt=1e18)], ...] = ()

    @property
    def median_s(self) -> float:
        """Median step time."""
        return statistics.median(self.step_s)

    @property
    def spread(self) -> float:
        """See `spread_of`."""
        return spread_of(self.step_s)

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return None if self.predicted_s is None else self.predicted_s / self.median_s - 1.0


class PlanTimings(Record, frozen=True):
    """Timed plans of one job.

    Attributes:
        name: For people.
        environment: Facts about hosts, devices and software, by name: text or numbers.
        plans: In the order in which they ran.
    """

    name: str
    environment: Mapping[str, str | float | int]
    plans: tuple[PlanTiming, ...]

    def save(self, path: str | Path) -> None:
        """Writes ``*.timings.json``, atomically."""
        write_json(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {"format": FORMAT, "version": VERSION, **plain(self)}

    @staticmethod
    def load(path: str | Path) -> PlanTimings:
        """Reads and checks a timings file; see docs/formats.md."""
        return read_record(path, FORMAT, VERSION, lambda data: build(PlanTimings, data, "timings", whole_floats=True))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank.

    Raises:
        InputError: Fewer than two pairs, or all values of one side equal.
    """
    import numpy as np
    from scipy.stats import spearmanr

    if len(first) != len(second) or len(first) < 2 or len(set(first)) < 2 or len(set(second)) < 2:
        raise InputError("rank_correlation: it needs at least two pairs, and different values on both sides")
    return float(np.asarray(spearmanr(first, second).statistic))
