"""Where step times come from: the simulator, or real measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.instance import Instance
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.simulator import Simulator

_SIMULATORS = 32  # most that are kept


@dataclass(frozen=True)
class Evaluation:
    """Outcome of one plan.

    Attributes:
        step_time_s: inf when the step cannot complete.
        relative_overflow: Sum over devices of bytes over the limit, relative to the limit; 0 when it fits.
    """

    step_time_s: float
    relative_overflow: float

    @property
    def feasible(self) -> bool:
        return math.isfinite(self.step_time_s) and self.relative_overflow == 0.0


class Backend(Protocol):
    """What an environment asks of a backend."""

    calls: int

    def evaluate(self, instance: Instance, device_of_group: NDArray[np.int32]) -> Evaluation:
        """Step time and memory overflow of one plan; counts one call."""
        ...


class SimulatedBackend:
    """The simulator of DESIGN section 4.

    Attributes:
        calls: Evaluations so far.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._simulators: dict[Instance, Simulator] = {}

    def simulator(self, instance: Instance) -> Simulator:
        """The reusable simulator of the instance's problem."""
        simulator = self._simulators.pop(instance, None)
        if simulator is None:
            simulator = Simulator(instance.problem, **instance.execution.arguments)
        self._simulators[instance] = simulator  # the youngest now
        if len(self._simulators) > _SIMULATORS:
            del self._simulators[next(iter(self._simulators))]
        return simulator

    def evaluate(self, instance: Instance, device_of_group: NDArray[np.int32]) -> Evaluation:
        """Simulates one plan."""
        self.calls += 1
        step_time, overflow = self.simulator(instance).evaluate(device_of_group)
        return Evaluation(float(step_time), float(overflow))


class MeasuredBackend(SimulatedBackend):
    """Real step times as reward; memory is still checked in the simulator first, so that no plan known not to fit is run.

    Args:
        measure: Runs a plan and returns its median step time in seconds; raises `MemoryError` (or
            ``torch.OutOfMemoryError``) when it does not fit. `rlplace.runtime.measure.step_timer` makes one.
    """

    def __init__(self, measure: Callable[[PlacementPlan], float]) -> None:
        super().__init__()
        self._measure = measure

    def evaluate(self, instance: Instance, device_of_group: NDArray[np.int32]) -> Evaluation:
        """Measures one plan; a plan that runs out of memory counts as overflowing by all of one device."""
        simulated = super().evaluate(instance, device_of_group)
        if not simulated.feasible:
            return simulated
        plan = make_plan(instance.problem, device_of_group, planner="measured", **instance.execution.arguments)
        try:
            return Evaluation(float(self._measure(plan)), 0.0)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                return Evaluation(simulated.step_time_s, 1.0)
            raise
