"""`PlanTimings`: what whole plans took on real devices, beside what the simulator predicted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlplace.errors import InputError, show
from rlplace.files import check_keys, read_record, write_json

FORMAT = "rlplace.plan_timings"
VERSION = 1
MODES = ("computed", "replayed")
"""Whether the ops of a step ran, or slept as long as they were predicted to take while real tensors crossed the real links."""


@dataclass(frozen=True)
class PlaceTiming:
    """One device during the median step. Seconds; what is left of the step it was idle, or did what is counted nowhere.

    Attributes:
        rank: Of its process.
        host: Name of its machine.
        busy_s: In forward and backward passes.
        wait_s: Waiting for other processes.
        reduce_s: Adding up gradients of replicas and ties, waiting included.
        update_s: In the optimizer.
        peak_memory_bytes: Largest allocation of the device in any step; None where the device does not report it.
        predicted_busy_s: Simulated passes and updates.
        predicted_peak_bytes: Simulated.
    """

    rank: int
    host: str
    busy_s: float
    wait_s: float
    reduce_s: float
    update_s: float
    peak_memory_bytes: int | None = None
    predicted_busy_s: float | None = None
    predicted_peak_bytes: int | None = None


def spread_of(step_s: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for fewer than four steps."""
    if len(step_s) < 4:
        return 0.0
    low, _, high = statistics.quantiles(step_s, n=4)
    return (high - low) / statistics.median(step_s)


@dataclass(frozen=True)
class PlanTiming:
    """The timed steps of one plan.

    Attributes:
        name: For people, such as the plan's file name.
        plan: Fingerprint of the plan.
        problem: Fingerprint of its problem.
        planner: Who made it.
        engine: Which engine ran it.
        mode: One of `MODES`.
        step_s: Seconds of every timed step, warm-up left out: the slowest process counts.
        predicted_s: Simulated step time; None without the problem.
        places: Per process that the plan uses, by rank.
        setup_s: From the plan to the first step.
    """

    name: str
    plan: str
    problem: str
    planner: str
    engine: str
    mode: str
    step_s: tuple[float, ...]
    predicted_s: float | None
    places: tuple[PlaceTiming, ...]
    setup_s: float

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


@dataclass(frozen=True)
class PlanTimings:
    """Timed plans of one job.

    Attributes:
        name: For people.
        environment: Facts about hosts, devices and software, by name: text or numbers.
        plans: In the order in which they ran.
    """

    name: str
    environment: Mapping[str, str | float | int] = field(default_factory=dict)
    plans: tuple[PlanTiming, ...] = ()

    def save(self, path: str | Path) -> None:
        """Writes ``*.timings.json``, atomically."""
        write_json(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        plans = [{key: value for key, value in asdict(plan).items() if value is not None} for plan in self.plans]
        for plan in plans:
            plan["places"] = [{key: value for key, value in place.items() if value is not None} for place in plan["places"]]
        return {"format": FORMAT, "version": VERSION, "name": self.name, "environment": dict(self.environment), "plans": plans}

    @staticmethod
    def load(path: str | Path) -> PlanTimings:
        """Reads and checks a timings file; see docs/formats.md."""
        return read_record(path, FORMAT, VERSION, _parse)


def _parse(data: dict[str, Any]) -> PlanTimings:
    check_keys(data, {"plans"}, {"name", "environment"}, "timings")
    environment = data.get("environment", {})
    if not isinstance(environment, dict) or not all(isinstance(v, (str, int, float)) for v in environment.values()):
        raise InputError("environment must hold text and numbers by name")
    if not isinstance(data["plans"], list):
        raise InputError("plans must be a list")
    plans = tuple(_plan(item, f"plans[{index}]") for index, item in enumerate(data["plans"]))
    return PlanTimings(str(data.get("name", "")), environment, plans)


def _plan(item: Any, where: str) -> PlanTiming:
    names = {f.name for f in fields(PlanTiming)}
    _record(item, names - {"predicted_s"}, {"predicted_s"}, where)
    for key in ("name", "plan", "problem", "planner", "engine", "mode"):
        if not isinstance(item[key], str):
            raise InputError(f"{where}.{key} must be text")
    if item["mode"] not in MODES:
        raise InputError(f"{where}.mode is {show(item['mode'])}; it must be one of {', '.join(MODES)}")
    if not isinstance(item["step_s"], list) or not item["step_s"] or not isinstance(item["places"], list):
        raise InputError(f"{where}: step_s and places must be lists, step_s not empty")
    steps = tuple(_seconds(value, f"{where}.step_s") for value in item["step_s"])
    if min(steps) <= 0:
        raise InputError(f"{where}.step_s: a step takes more than no time")
    places = tuple(place_from_dict(place, f"{where}.places[{index}]") for index, place in enumerate(item["places"]))
    predicted = item.get("predicted_s")
    return PlanTiming(
        **{key: item[key] for key in ("name", "plan", "problem", "planner", "engine", "mode")},
        step_s=steps,
        predicted_s=None if predicted is None else _seconds(predicted, f"{where}.predicted_s"),
        places=places,
        setup_s=_seconds(item["setup_s"], f"{where}.setup_s"),
    )


_OPTIONAL = {"peak_memory_bytes", "predicted_busy_s", "predicted_peak_bytes"}


def place_from_dict(item: Any, where: str) -> PlaceTiming:
    """Builds a `PlaceTiming` from parsed JSON, with the checks of a timings file."""
    _record(item, {f.name for f in fields(PlaceTiming)} - _OPTIONAL, _OPTIONAL, where)
    if isinstance(item["rank"], bool) or not isinstance(item["rank"], int) or item["rank"] < 0:
        raise InputError(f"{where}.rank must be a whole number from 0 up")
    if not isinstance(item["host"], str):
        raise InputError(f"{where}.host must be text")
    times = {key: _seconds(value, f"{where}.{key}") for key, value in item.items() if key.endswith("_s")}
    sizes = {key: int(_seconds(value, f"{where}.{key}")) for key, value in item.items() if key.endswith("_bytes")}
    return PlaceTiming(rank=item["rank"], host=item["host"], **times, **sizes)  # type: ignore[arg-type]


def _record(item: Any, needed: set[str], optional: set[str], where: str) -> None:
    if not isinstance(item, dict):
        raise InputError(f"{where} must be an object")
    check_keys(item, needed, optional, where)


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e18:
        raise InputError(f"{where} is {show(value)}; expected a number from 0 up")
    return float(value)


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
