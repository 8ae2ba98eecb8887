"""What is believed about a cluster after some measurements, and how a next plan is proposed from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError
from rlplace.measured.calibrate import Fit, fit_correction
from rlplace.measured.campaign import Campaign
from rlplace.measured.correction import corrected
from rlplace.measured.trial import Trial
from rlplace.planners import get_planner
from rlplace.planners.common.evaluate import Execution
from rlplace.problem import Problem
from rlplace.simulator import Simulator

_FRESH = 10  # so many trials after the last time, calibration begins without the last one, which may be a local optimum


@dataclass(frozen=True, eq=False)
class Belief:
    """The corrected problem and the plans that were measured.

    Axes: P plans, G groups.

    Attributes:
        problem: Corrected, with less memory where plans ran out of it.
        execution: Micro-batches and schedule.
        fit: How it was corrected.
        plans: int32 [P, G], distinct plans with times.
        seconds: float64 [P], their measured step times, freed of drift.
        noise: float64 [P], relative standard deviation of each.
        best: Number of the fastest plan that stayed in its race.
        known: All plans that were tried, failures included.
    """

    problem: Problem
    execution: Execution
    fit: Fit
    plans: NDArray[np.int32]
    seconds: NDArray[np.float64]
    noise: NDArray[np.float64]
    best: int
    known: frozenset[tuple[int, ...]]

    @property
    def incumbent(self) -> NDArray[np.int32]:
        """int32 [G], the fastest plan."""
        return self.plans[self.best]

    @cached_property
    def floor(self) -> NDArray[np.int32]:
        """int32 [G], the best classical plan of the corrected problem; the incumbent where none fits."""
        try:
            return get_planner("best")(self.problem, **self.execution.arguments).device_of_group
        except InfeasibleError:
            return self.incumbent

    def simulator(self) -> Simulator:
        """Of the corrected problem."""
        return Simulator(self.problem, **self.execution.arguments)


class Proposer(Protocol):
    """Says which plan to measure next."""

    def propose(self, belief: Belief, *, calls: int, number: int) -> NDArray[np.int32] | None:
        """A plan int32 [G] that is not known yet and fits the memory; None when none is left.

        Args:
            belief: What is known.
            calls: Simulations that it may cost.
            number: Which proposal this is, from 0; seeds follow from it.
        """
        ...


def believe(campaign: Campaign, before: Belief | None = None) -> Belief | None:
    """Calibrates to all trials of a campaign; None while no plan has worked."""
    best = campaign.best()
    if best is None:
        return None
    # A plan may be there more than once, where several campaigns have measured it.
    trials: list[Trial] = list({t.device_of_group: t for t in campaign.trials if t.timed and not t.anchor}.values())
    seconds = [campaign.seconds(trial) for trial in trials]
    start = None if before is None or len(trials) % _FRESH == 0 else before.fit
    fit = fit_correction(campaign.problem, trials, execution=campaign.execution, seconds=seconds, start=start)
    noise = campaign.noise / np.sqrt([len(trial.step_s) for trial in trials])
    return Belief(
        problem=with_less_room(corrected(campaign.problem, fit.correction), campaign.trials, campaign.execution),
        execution=campaign.execution,
        fit=fit,
        plans=np.array([trial.device_of_group for trial in trials], dtype=np.int32),
        seconds=np.array(seconds),
        noise=noise,
        best=next(n for n, trial in enumerate(trials) if trial.device_of_group == best.device_of_group),
        known=frozenset(trial.device_of_group for trial in campaign.trials),
    )


_LESS = 0.98  # of the peak that did not fit is believed to fit


def with_less_room(problem: Problem, trials: Iterable[Trial], execution: Execution) -> Problem:
    """The problem with smaller memories where plans ran out of memory although they should have fitted.

    Which device ran out is not known: the one whose simulated peak was nearest to its limit is blamed. No limit falls below
    what a plan that worked has needed there.

    Args:
        problem: Any.
        trials: Measurements of its plans.
        execution: Micro-batches and schedule of the step.
    """
    known = list(trials)
    failed = [trial for trial in known if trial.status == "out_of_memory"]
    if not failed:
        return problem
    simulator = Simulator(problem, **execution.arguments)
    limit = problem.capacity_bytes

    def peak(trial: Trial) -> NDArray[np.float64]:
        simulator.evaluate(np.array(trial.device_of_group, dtype=np.int32))
        return np.asarray(simulator.peak_memory_bytes, dtype=np.float64)  # what is reserved is in it, as in the limit

    needed = np.max([peak(trial) for trial in known if trial.timed], axis=0, initial=0.0)
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
