"""`Prediction`: predicted step time and memory of a plan, and further figures of its planner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rlplace.records import Number, Record, Whole, build, plain

Facts = Mapping[str, Any]

_SIMULATED = (
    "step_time_s", "samples_per_s", "peak_memory_bytes", "fullest_share", "feasible", "executor", "compute", "transfer", "idle",
)  # fmt: skip


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
            the same (`rlplace.plan.memory`).
        strategies: The strategy and its rivals, see `rlplace.plan.rivals`.
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

    def told(self, **beside: Any) -> Prediction:
        """The same prediction with other fields."""
        return replace(self, **beside)

    def simulated(self, line: Prediction) -> Prediction:
        """The same prediction with the figures of another simulation."""
        return replace(self, **{name: getattr(line, name) for name in _SIMULATED})

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data: `extra` beside the other keys; unknown values are left out, except figures of a simulation."""
        simulated = {} if self.executor is None else {name: getattr(self, name) for name in _SIMULATED}
        data = plain(simulated) | plain(self)
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
        return build(Prediction, {**known, "extra": {key: value for key, value in data.items() if key not in known}}, where)
