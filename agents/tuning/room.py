"""What a plan that ran out of memory teaches: the device that was fullest has less room than it was said to have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rlplace.measured.trial import Trial
from rlplace.planners.common.evaluate import Execution
from rlplace.problem import Problem
from rlplace.simulator import Simulator

_LESS = 0.98  # of the peak that did not fit is believed to fit


def with_less_room(problem: Problem, trials: Iterable[Trial], execution: Execution) -> Problem:
    """The problem with smaller memories where plans ran out of memory although they should have fitted.

    Which device ran out is not known: the one whose simulated peak was nearest to its limit is blamed. No limit falls below
    what a plan that worked has needed there.

    Args:
        problem: Any.
        trials: Of its plans.
        execution: Micro-batches and schedule of the step.
    """
    found = list(trials)
    failed = [trial for trial in found if trial.status == "out_of_memory"]
    if not failed:
        return problem
    simulator = Simulator(problem, **execution.arguments)
    limit = problem.capacity_bytes

    def peak(trial: Trial) -> NDArray[np.float64]:
        simulator.evaluate(np.array(trial.device_of_group, dtype=np.int32))
        return np.asarray(simulator.peak_memory_bytes, dtype=np.float64)  # what is reserved is in it, as in the limit

    needed = np.max([peak(trial) for trial in found if trial.timed], axis=0, initial=0.0)
    room = limit.copy()
    for trial in failed:
        own = peak(trial)
        fullest = int(np.argmax(own / np.minimum(limit, 1e18)))
        room[fullest] = min(room[fullest], _LESS * own[fullest])
    room = np.minimum(np.maximum(room, needed), limit)
    devices = [
        device if room[number] == limit[number] else dataclasses.replace(device, memory_bytes=int(room[number]))
        for number, device in enumerate(problem.devices)
    ]
    return dataclasses.replace(problem, devices=tuple(devices))
