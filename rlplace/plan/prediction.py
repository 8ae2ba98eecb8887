"""`Prediction`: predicted step time and memory of a plan, and further figures of its planner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rlplace.plan.device_runs import with_equal, without_equal
from rlplace.records import Number, Record, Whole, build, plain
from rlplace.text import bytes_text

Facts = Mapping[str, Any]

_SIMULATED = (
    "step_time_s", "samples_per_s", "peak_memory_bytes", "fullest_share", "feasible", "executor", "compute", "transfer", "idle",
)  # fmt: skip


_BY_DEVICE = "peak_memory_bytes", "host_bytes", "held_back_bytes"


class Prediction(Record, frozen=True):
    """The `predicted` entry of a plan; unknown values are None or empty.

    Attributes:
        step_time_s: Simulated step time; None when the plan is not feasible.
        samples_per_s: Samples per second.
        peak_memory_bytes: Peak memory per device.
        fullest_share: Peak over memory of the fullest device; None where none has a limit.
        feasible: Whether the plan fits and can run.
        host_bytes: Bytes of the model in the memory of each host.
        parts: Seconds of a step on the busiest device, by activity.
        executor: Name of the executor that simulated it.
        compute: Busy seconds, summed over devices.
        transfer: Seconds of transfers, summed over them.
        idle: Seconds in which devices do nothing, summed over them.
        op_level: The same plan simulated op by op.
        held_back_bytes: Memory per device that was kept from the planner, so that the plan fits op by op.
        memory: The table of `rlplace place --memory`: an entry a device of a placement, of a strategy one for devices that hold
            the same (`rlplace.plan.prediction`).
        strategies: The strategy and its rivals, see `rlplace.plan.prediction`.
        floor_step_time_s: Step time of the best classical plan, beside the agent's.
        search_calls: Simulator calls of the agent's search.
        agent: Checkpoint of the agent that planned.
        proof: What an exact planner has proven.
        bipartition: The optima of the chain without communication.
        device_map: Changes by rounding to a device map.
        extra: Further keys, which another planner wrote.
    """

    step_time_s: float | None = None
    samples_per_s: float | None = None
    peak_memory_bytes: tuple[Whole, ...] = ()
    fullest_share: float | None = None
    feasible: bool | None = None
    host_bytes: tuple[Whole, ...] = ()
    parts: dict[str, Number] | None = None
    executor: str | None = None
    compute: float | None = None
    transfer: float | None = None
    idle: float | None = None
    op_level: Prediction | None = None
    held_back_bytes: tuple[Whole, ...] = ()
    memory: tuple[Facts, ...] = ()
    strategies: tuple[Facts, ...] = ()
    floor_step_time_s: float | None = None
    search_calls: Whole | None = None
    agent: str | None = None
    proof: Facts | None = None
    bipartition: Facts | None = None
    device_map: Facts | None = None
    extra: Facts = msgspec.field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Step time for comparisons: inf where there is none."""
        return math.inf if self.step_time_s is None else self.step_time_s

    def replace(self, **fields: Any) -> Prediction:
        """Returns the same prediction with other fields."""
        return replace(self, **fields)

    def with_simulation(self, line: Prediction) -> Prediction:
        """Returns the same prediction with the figures of another simulation."""
        return replace(self, **{name: getattr(line, name) for name in _SIMULATED})

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data: `extra` beside the other keys; unknown values are left out, except figures of a simulation."""
        simulated = {} if self.executor is None else {name: getattr(self, name) for name in _SIMULATED}
        data = with_equal(plain(simulated) | plain(self), _BY_DEVICE)
        if self.op_level is not None:
            data["op_level"] = with_equal(data["op_level"], _BY_DEVICE)
        extra = data.pop("extra", {})
        return {**data, **extra}

    @staticmethod
    def from_dict(data: Any, where: str = "predicted") -> Prediction:
        """Builds a prediction from parsed JSON; unknown keys become `extra`.

        Raises:
            InputError: An entry is of the wrong type.
        """
        if not isinstance(data, Mapping):
            return build(Prediction, data, where)
        known = {key: value for key, value in data.items() if key in Prediction.__struct_fields__ and key != "extra"}
        known = without_equal(known, _BY_DEVICE, where)
        if isinstance(known.get("op_level"), Mapping):
            known["op_level"] = without_equal(known["op_level"], _BY_DEVICE, f"{where}.op_level")
        return build(Prediction, {**known, "extra": {key: value for key, value in data.items() if key not in known}}, where)


class HeldMemory(msgspec.Struct, frozen=True):
    """Memory of devices that hold the same, when they hold the most.

    Attributes:
        devices: Their names.
        parts: Bytes by kind (`rlplace.strategy.search.remarks.PARTS`); they add up to `total_bytes`.
        total_bytes: The peak.
        capacity_bytes: Memory of one of them; None where it has no limit.
        op_by_op: Whether the peak was simulated op by op; else activations are the bound of the block executor.
    """

    devices: tuple[str, ...]
    parts: dict[str, int]
    total_bytes: Whole
    capacity_bytes: Whole | None
    op_by_op: bool


def memory_of(predicted: Prediction) -> tuple[HeldMemory, ...]:
    """Returns the entries of a strategy's prediction.

    Raises:
        InputError: They have another form than planning writes.
    """
    return build(tuple[HeldMemory, ...], list(predicted.memory), "plan: predicted.memory")


_Positive = Annotated[float, Meta(gt=0.0, lt=1e18)]


class Rival(msgspec.Struct, frozen=True):
    """Another strategy for the same step.

    Attributes:
        kind: Name of its kind, for display.
        words: The strategy in one line; "" where there is none.
        devices: Number of devices that it uses.
        step_time_s: Step time; None where it does not fit or cannot run.
        samples_per_s: Samples per second; None where it does not fit or cannot run.
        over_bytes: Bytes over capacity, summed over its devices.
        uniform: Whether it is the best uniform one.
        reason: Why it was not evaluated.
        strategy: The strategy as plain data, as in files.
    """

    kind: str
    words: str
    devices: Whole
    step_time_s: _Positive | None
    samples_per_s: _Positive | None
    over_bytes: Whole = 0
    uniform: bool = False
    reason: str | None = None
    strategy: dict[str, Any] | None = None

    @property
    def remark(self) -> str:
        """The strategy in one line, or why there is no step time."""
        if self.step_time_s is not None:
            return self.words
        return self.reason or f"{too_large(self.over_bytes, self.devices)}: {self.words}"


class BatchTried(msgspec.Struct, frozen=True):
    """The best strategy of a batch, where the batch was chosen, too.

    Attributes:
        batch: Samples a step.
        epochs: Epochs to the target.
        target_s: Proportional to the time to the target; None where nothing fits.
        step_time_s: Step time; None where nothing fits.
        words: The strategy.
        reason: Why there is none.
    """

    batch: Whole
    epochs: _Positive
    target_s: _Positive | None
    step_time_s: _Positive | None
    words: str
    reason: str | None


def too_large(over_bytes: float, devices: int) -> str:
    """Returns bytes over capacity that are a sum over so many devices, for people."""
    return f"too large by {bytes_text(over_bytes)}" + (f" on {devices} devices together" if devices > 1 else "")


def rivals_of(predicted: Prediction) -> tuple[Rival, ...]:
    """Returns the strategy itself first, then its rivals: the next best by step time, then the best of each kind.

    Raises:
        InputError: The prediction has them in another form than planning writes.
    """
    return build(tuple[Rival, ...], list(predicted.strategies), "plan: predicted.strategies")


def quickest_of(rivals: Sequence[Rival]) -> Rival:
    """Returns the quickest of a strategy and its rivals: another than the strategy where that is simpler and about as quick."""
    return min(rivals, key=lambda rival: math.inf if rival.step_time_s is None else rival.step_time_s)


def batches_of(predicted: Prediction) -> tuple[BatchTried, ...]:
    """Returns the batches that were compared; none where the batch was given. Raises as `rivals_of` does."""
    return build(tuple[BatchTried, ...], predicted.extra.get("batches", []), "plan: predicted.batches")
