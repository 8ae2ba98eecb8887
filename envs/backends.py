"""Sources of step times: the simulator, or real measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.instance import PlacementInstance
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.simulator import Simulator
from rlplace.simulator.records import TRANSFERS

KEPT = 32
"""Instances whose simulators are kept; with more, those that were not used for longest are made again."""


@dataclass(frozen=True)
class Evaluation:
    """Outcome of one plan.

    Attributes:
        step_time_s: Step time; inf when the step cannot complete.
        relative_overflow: Sum over devices of bytes over the limit, relative to the limit; 0 when it fits.
    """

    step_time_s: float
    relative_overflow: float

    @property
    def feasible(self) -> bool:
        return math.isfinite(self.step_time_s) and self.relative_overflow == 0.0


class Backend(Protocol):
    """The interface of a backend."""

    calls: int

    def evaluate(self, instance: PlacementInstance, device_of_group: NDArray[np.int32]) -> Evaluation:
        """Returns step time and memory overflow of one plan; counts one call."""
        ...


class SimulatedBackend:
    """The simulator (`rlplace.simulator.reference`).

    Attributes:
        calls: Evaluations so far.
        simulator: The reusable simulator of an instance's problem.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.simulator = lru_cache(KEPT)(lambda of: Simulator(of.problem))

    def evaluate(self, instance: PlacementInstance, device_of_group: NDArray[np.int32]) -> Evaluation:
        """Simulates one plan."""
        self.calls += 1
        step_time, overflow = self.simulator(instance).evaluate(device_of_group)
        return Evaluation(float(step_time), float(overflow))


class StepParts:
    """Seconds and bytes of the devices in a step of an instance's plans."""

    def __init__(self, instance: PlacementInstance) -> None:
        self._simulator = Simulator(instance.problem, timeline=True)

    def __call__(self, device_of_group: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """Returns by device [D] seconds of work, of transfers that leave, and without work; peak bytes.

        Args:
            device_of_group: int32 [G].
        """
        step_s, _ = self._simulator.evaluate(device_of_group)
        work, busy_s = self._simulator.work, self._simulator.busy_s
        sent = work.transfer[: work.layout[TRANSFERS]] if step_s < math.inf else work.transfer[:0]
        seconds: NDArray[Any] = np.bincount(sent["source"], sent["end_s"] - sent["start_s"], len(busy_s))
        return {
            "compute_s": busy_s.copy(),
            "transfer_s": seconds,
            "idle_s": np.maximum(step_s - busy_s, 0.0) if step_s < math.inf else np.zeros(len(busy_s)),
            "peak_memory_bytes": self._simulator.peak_memory_bytes.copy(),
        }


class MeasuredBackend(SimulatedBackend):
    """Real step times as reward.

    Memory is checked in the simulator first, so that no plan known not to fit is run. A plan that fails for real gets the
    reward of one that needs twice a device's memory: bad, but finite. What was measured is not measured again.
    """

    def __init__(self, measure: Callable[[PlacementPlan], float]) -> None:
        """Says how plans are measured.

        Args:
            measure: Runs a plan and returns its step time in seconds, as `rlplace.runtime.job.measure.PlanTimer` does on the
                processes of a job; it raises `MemoryError` or ``torch.OutOfMemoryError`` when the plan does not fit.
        """
        super().__init__()
        self._measure = measure
        self._known: dict[tuple[str, bytes], float] = {}

    def evaluate(self, instance: PlacementInstance, device_of_group: NDArray[np.int32]) -> Evaluation:
        """Measures one plan, unless the simulator says that it does not fit."""
        simulated = super().evaluate(instance, device_of_group)
        if not simulated.feasible:
            return simulated
        key = instance.problem.fingerprint, np.asarray(device_of_group, dtype=np.int32).tobytes()
        if key not in self._known:
            self._known[key] = self._seconds(instance, device_of_group)
        seconds = self._known[key]
        return Evaluation(simulated.step_time_s, 1.0) if seconds == math.inf else Evaluation(seconds, 0.0)

    def _seconds(self, instance: PlacementInstance, device_of_group: NDArray[np.int32]) -> float:
        """Measures the step time; inf when the plan failed."""
        try:
            return float(self._measure(make_plan(instance.problem, device_of_group, planner="measured")))
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                return math.inf
            raise
