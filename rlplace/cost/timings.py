"""Measured times. `Measurement`: of the ops and whole training steps of one model on one real device. `PlanTimings`: of whole
plans on real devices, beside the simulator's predictions.

Times of ops are device seconds. An op is identified by its target, direction, dtype, FLOPs, bytes and dims, all that an op
graph knows of it; ops of a model that agree in all of them are one record with a count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from rlplace.cost.curve import Direction
from rlplace.errors import InputError
from rlplace.files import check_header, read_record, write_json
from rlplace.model.graph.opgraph import OpKind
from rlplace.records import Count, Record, Text, Whole, build, check_record, plain

FORMAT = "rlplace.measurement"
VERSION = 1

Seconds = Annotated[float, Meta(ge=0, le=1e6)]
SomeSeconds = Annotated[float, Meta(gt=0, le=1e6)]
Reading = Seconds

CacheState = Literal["step", "warm", "flushed"]
"""Contents of the caches when an op ran: those that the ops before it in a real training step left there (`step`); its own
inputs (`warm`); nothing of its own (`flushed`).
"""


class MeasuredOp(Record, frozen=True):
    """The time of one op.

    Attributes:
        target: Forward op as torch knows it, for example ``"aten.linear.default"``, also for its backward; the optimizer's name
            (``"adam"``) for an update.
        kind: A `rlplace.model.graph.opgraph.OpKind`.
        dtype: For example ``"float32"``.
        direction: A `Direction`.
        flops: FLOPs; a multiply-add counts two.
        size_bytes: Bytes read plus written.
        count: Ops of the model that share this record.
        seconds: Mean over these ops of the median over repeats.
        p10_s: 10th percentile over all ops and repeats.
        p90_s: 90th percentile.
        repeats: Timed runs of each op.
        dims: Sizes by name, may be empty.
        issue_s: Host time to issue the op where device and host run side by side; None where the host does the work itself.
    """

    target: Text
    kind: OpKind
    dtype: Text
    direction: Direction
    flops: Annotated[float, Meta(ge=0, lt=1e30)]
    size_bytes: Whole
    count: Count
    seconds: Seconds
    p10_s: Seconds
    p90_s: Seconds
    repeats: Count
    dims: Mapping[Text, Whole] = {}
    issue_s: Seconds | None = None


class StepTiming(Record, frozen=True):
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

    seconds: SomeSeconds
    min_s: SomeSeconds
    p10_s: SomeSeconds
    p90_s: SomeSeconds
    repeats: Count
    undisturbed: Whole
    busy_s: SomeSeconds | None = None
    instrumented_s: SomeSeconds | None = None
    peak_memory_bytes: Whole | None = None

    @property
    def quiet_s(self) -> float:
        """Seconds of a step on a machine that does nothing else: the median, or processor time if most steps were disturbed."""
        return self.busy_s if self.busy_s is not None and 2 * self.undisturbed < self.repeats else self.seconds


class ControlTiming(Record, frozen=True):
    """A matrix product of fixed shape, timed before and after everything else.

    Attributes:
        shape: Shape of the product.
        first_s: Median before.
        last_s: Median after.
    """

    shape: str
    first_s: SomeSeconds
    last_s: SomeSeconds

    @property
    def drift(self) -> float:
        """Last over first: 1 when the device was as fast at the end as at the start."""
        return self.last_s / self.first_s


class Environment(Record, frozen=True):
    """Device, software and conditions of a measurement.

    Attributes:
        device: Name as the driver or the processor reports it.
        device_kind: Name of the device kind in a cluster that the times belong to.
        device_type: ``"cpu"`` or ``"cuda"``.
        torch: Version of torch.
        threads: Torch threads that ops ran on.
        clock_mhz: Clock at the start, None where unknown.
        clock_end_mhz: Clock at the end.
        power_limit_w: Power cap, None where unknown.
        temperature_c: Temperature at the end, None where unknown.
        details: Further facts for display, by name: text or numbers.
    """

    device: str
    device_kind: str
    device_type: str
    torch: str
    threads: Count
    clock_mhz: Reading | None = None
    clock_end_mhz: Reading | None = None
    power_limit_w: Reading | None = None
    temperature_c: Reading | None = None
    details: Mapping[str, str | float | int] = {}


class MeasuredModel(Record, frozen=True):
    """The model that was measured.

    Attributes:
        model: MODEL text.
        batch: Samples of a step.
        seq: Sequence length.
        dtype: Precision option.
        optimizer: Optimizer option.
    """

    model: str
    batch: int
    seq: int
    dtype: str
    optimizer: str


class Measurement(Record, frozen=True):
    """Timed ops and steps of one model on one device.

    Attributes:
        name: For people; not part of the fingerprint.
        model: MODEL text with its options.
        environment: Where and how the times were taken.
        cache: A `CacheState`.
        ops: Timed ops, may be empty.
        step: Whole steps, None when they were not timed.
        control: The control shape.
        host_s: Part of an instrumented step that belongs to no op (before the first op, between forward and backward).
        launches: Kernels of a step as pricing counts them (`rlplace.cost.calls.op_launches`); 0 where not counted.
    """

    name: str
    model: MeasuredModel
    environment: Environment
    cache: CacheState
    ops: tuple[MeasuredOp, ...]
    step: StepTiming | None
    control: ControlTiming
    host_s: Seconds = 0.0
    launches: Annotated[float, Meta(ge=0, le=1e12)] = 0.0

    def __post_init__(self) -> None:
        check_record(self, "measurement")

    @property
    def ops_s(self) -> float:
        """Seconds of all ops of a step."""
        return sum(op.seconds * op.count for op in self.ops)

    def to_dict(self) -> dict[str, Any]:
        """Returns the measurement as plain JSON data; unknown values are left out."""
        return {"format": FORMAT, "version": VERSION, **plain(self)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Measurement:
        """Builds a measurement from parsed JSON, with the same checks as `load`."""
        return build(Measurement, check_header(data, FORMAT, VERSION, where="measurement"), "measurement")

    def save(self, path: str | Path) -> None:
        """Writes ``*.measure.json``, atomically."""
        write_json(path, self.to_dict())

    @staticmethod
    def load(path: str | Path) -> Measurement:
        """Reads and checks a measurement file; see docs/formats.md.

        Raises:
            InputError: The file is missing, malformed, newer than this code, or holds impossible numbers.
        """
        return read_record(path, FORMAT, VERSION, lambda data: build(Measurement, data, "measurement"))


TIMINGS_FORMAT = "rlplace.plan_timings"
_AnySeconds = Annotated[float, Meta(ge=0, lt=1e18)]
_StepSeconds = Annotated[float, Meta(gt=0, lt=1e18)]


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
    busy_s: _AnySeconds
    wait_s: _AnySeconds
    update_s: _AnySeconds
    peak_memory_bytes: Whole | None = None
    predicted_busy_s: _AnySeconds | None = None
    predicted_peak_bytes: Whole | None = None


def spread_of(step_s: Sequence[float]) -> float:
    """Returns the interquartile range over the median; 0 for fewer than four steps."""
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
        step_s: _AnySeconds of every timed step, warm-up left out: the slowest process counts.
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
    step_s: Annotated[tuple[_StepSeconds, ...], Meta(min_length=1)]
    places: tuple[PlaceTiming, ...]
    setup_s: _AnySeconds
    predicted_s: _AnySeconds | None = None
    peak_memory_bytes: tuple[Whole | None, ...] = ()
    pace_s: tuple[_StepSeconds, ...] = ()
    stage_busy_s: tuple[_StepSeconds, ...] = ()

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
        """Returns plain JSON data."""
        return {"format": TIMINGS_FORMAT, "version": VERSION, **plain(self)}

    @staticmethod
    def load(path: str | Path) -> PlanTimings:
        """Reads and checks a timings file; see docs/formats.md."""
        return read_record(path, TIMINGS_FORMAT, VERSION, lambda data: build(PlanTimings, data, "timings", whole_floats=True))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's rank correlation; ties share their mean rank.

    Raises:
        InputError: Fewer than two pairs, or all values of one side equal.
    """
    import numpy as np
    from scipy.stats import spearmanr

    if len(first) != len(second) or len(first) < 2 or len(set(first)) < 2 or len(set(second)) < 2:
        raise InputError("rank_correlation: it needs at least two pairs, and different values on both sides")
    return float(np.asarray(spearmanr(first, second).statistic))
