"""`Measurement`: what ops and whole training steps of one model took on one real device.

Times are device seconds. An op is told by its target, direction, dtype, FLOPs, bytes and dims, which is what an op graph knows
of it; ops of a model that agree in all of them are one record with a count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlplace.cost.table import DIRECTIONS

__all__ = ["CACHE_STATES", "DIRECTIONS", "ControlTiming", "Environment", "Measurement", "MeasuredOp", "StepTiming"]

CACHE_STATES = ("step", "warm", "flushed")
"""What was in the caches when an op ran: whatever the ops before it in a real training step left there (`step`); its own inputs
(`warm`); nothing of its own (`flushed`)."""


@dataclass(frozen=True)
class MeasuredOp:
    """The time of one op.

    Attributes:
        target: Forward op as torch knows it, for example ``"aten.linear.default"``, also for its backward; the optimizer's name
            (``"adam"``) for an update.
        kind: One of `rlplace.graph.opgraph.OP_KINDS`.
        dtype: For example ``"float32"``.
        direction: One of `DIRECTIONS`.
        flops: A multiply-add counts two.
        size_bytes: Read plus written.
        dims: Sizes by name, may be empty.
        count: Ops of the model that this record stands for.
        seconds: Mean over these ops of the median over repeats.
        p10_s: 10th percentile over all ops and repeats.
        p90_s: 90th percentile.
        repeats: Timed runs of each op.
        issue_s: Host time to issue the op where device and host run side by side; None where the host does the work itself.
    """

    target: str
    kind: str
    dtype: str
    direction: str
    flops: float
    size_bytes: int
    dims: Mapping[str, int]
    count: int
    seconds: float
    p10_s: float
    p90_s: float
    repeats: int
    issue_s: float | None = None


@dataclass(frozen=True)
class StepTiming:
    """Whole training steps: forward, loss, backward, update. Wall time, unless said otherwise.

    Attributes:
        seconds: Median.
        min_s: Fastest step.
        p10_s: 10th percentile.
        p90_s: 90th percentile.
        repeats: Timed steps.
        undisturbed: How many of them kept the processor throughout; all of them where the host does not do the work.
        busy_s: Median processor time of the thread, which other programs do not lengthen; None unless one thread does all work.
        instrumented_s: Median of the steps in which single ops were timed; None when they were not.
        peak_memory_bytes: Largest allocation of the device during a step; None where the device does not report it.
    """

    seconds: float
    min_s: float
    p10_s: float
    p90_s: float
    repeats: int
    undisturbed: int
    busy_s: float | None = None
    instrumented_s: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def quiet_s(self) -> float:
        """Seconds of a step on a machine that does nothing else: the median, or processor time if most steps were disturbed."""
        return self.busy_s if self.busy_s is not None and 2 * self.undisturbed < self.repeats else self.seconds


@dataclass(frozen=True)
class ControlTiming:
    """A matrix product of fixed shape, timed before and after everything else.

    Attributes:
        shape: What was run.
        first_s: Median before.
        last_s: Median after.
    """

    shape: str
    first_s: float
    last_s: float

    @property
    def drift(self) -> float:
        """Last over first: 1 when the device was as fast at the end as at the start."""
        return self.last_s / self.first_s


@dataclass(frozen=True)
class Environment:
    """Where and how the times were taken.

    Attributes:
        device: Name as the driver or the processor reports it.
        device_kind: Name of the device kind in a cluster that the times belong to.
        device_type: ``"cpu"`` or ``"cuda"``.
        torch: Version.
        threads: Torch threads that ops ran on.
        clock_mhz: Clock at the start, None where unknown.
        clock_end_mhz: Clock at the end.
        power_limit_w: Power cap, None where unknown.
        temperature_c: At the end, None where unknown.
        details: Further facts for people, by name: text or numbers.
    """

    device: str
    device_kind: str
    device_type: str
    torch: str
    threads: int
    clock_mhz: float | None = None
    clock_end_mhz: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    details: Mapping[str, str | float | int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Measurement:
    """Timed ops and steps of one model on one device.

    Attributes:
        name: For people; not part of the fingerprint.
        model: MODEL text with its options: ``model``, ``batch``, ``seq``, ``dtype``, ``optimizer``.
        environment: Where it ran.
        cache: One of `CACHE_STATES`.
        ops: Timed ops, may be empty.
        step: Whole steps, None when they were not timed.
        control: The control shape.
        host_s: Part of an instrumented step that belongs to no op (before the first op, between forward and backward).
    """

    name: str
    model: Mapping[str, Any]
    environment: Environment
    cache: str
    ops: tuple[MeasuredOp, ...]
    step: StepTiming | None
    control: ControlTiming
    host_s: float = 0.0

    def __post_init__(self) -> None:
        from rlplace.cost.measurementfile import check_measurement

        check_measurement(self)

    @property
    def ops_s(self) -> float:
        """Seconds of all ops of a step."""
        return sum(op.seconds * op.count for op in self.ops)

    def save(self, path: str | Path) -> None:
        """Writes ``*.measure.json``, atomically."""
        from rlplace.cost.measurementfile import save_measurement

        save_measurement(self, path)

    @staticmethod
    def load(path: str | Path) -> Measurement:
        """Reads and checks a measurement file; see docs/formats.md."""
        from rlplace.cost.measurementfile import load_measurement

        return load_measurement(path)
