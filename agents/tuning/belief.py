"""The corrected model of a cluster after some measurements, and the proposal of a next plan from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.agents.network import PlacerNetwork
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import Instance
from rlplace.errors import InfeasibleError
from rlplace.measured.calibrate import Fit, fit_correction
from rlplace.measured.campaign import Campaign
from rlplace.measured.correction import corrected
from rlplace.measured.trial import Trial
from rlplace.planners import get_planner
from rlplace.problem import Problem
from rlplace.simulator import Simulator

Value = Callable[[NDArray[np.int32], NDArray[np.float64]], NDArray[np.float64]]
"""float64 [K] of plans int32 [K, G] and their simulated step times float64 [K]; small is good."""

_TRIES = 64
_DRAWN, _TRIED = 128, 24  # moves that are drawn from a plan, and those of them that are simulated


class Pool:
    """Plans that could be measured next.

    Attributes:
        calls: Simulations made by the pool itself.
    """

    def __init__(self, belief: Belief) -> None:
        self._belief = belief
        self._simulator = Simulator(belief.problem)
        self._plans: dict[tuple[int, ...], float] = {}
        self.calls = 0

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plans: Iterable[NDArray[np.int32]]) -> None:
        """Simulates plans int32 [G] and takes those that are unknown, complete and fit."""
        fresh = [plan for plan in plans if (key := tuple(plan.tolist())) not in self._belief.known and key not in self._plans]
        if not fresh:
            return
        table = np.ascontiguousarray(np.stack(fresh), dtype=np.int32)
        step, overflow = self._simulator.evaluate_many(table)
        self.calls += len(table)
        for plan, step_s, over in zip(table, step.tolist(), overflow.tolist(), strict=True):
            if np.isfinite(step_s) and over == 0.0:
                self._plans[tuple(plan.tolist())] = step_s

    def fill(self, rng: Generator, calls: int) -> None:
        """Adds random neighbours of the best plans: at least one, so that there is something to measure."""
        belief = self._belief
        allowed = belief.problem.group_allowed
        order = np.argsort(belief.seconds)[:4]
        done = self.calls + calls
        for _ in range(_TRIES):
            if self._plans and self.calls >= done:
                return
            plan = belief.plans[rng.choice(order)].copy()
            for group in rng.choice(len(plan), min(len(plan), int(rng.integers(1, 4))), replace=False):
                plan[group] = rng.choice(np.flatnonzero(allowed[group]))
            self.add([plan])

    def table(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """int32 [K, G] and float64 [K], plans and simulated step times."""
        return np.array(list(self._plans), dtype=np.int32), np.array(list(self._plans.values()))

    def least(self, value: Value) -> NDArray[np.int32] | None:
        """The plan of least value; None when there is none."""
        if not self._plans:
            return None
        plans, step_s = self.table()
        return plans[int(value(plans, step_s).argmin())]


def refine(
    pool: Pool,
    instance: Instance,
    network: PlacerNetwork,
    begin: Sequence[NDArray[np.int32]],
    value: Value,
    *,
    calls: int,
    seed: int,
) -> None:
    """Adds plans that are better by a value that the compiled search does not know: best-first, over the network's moves.

    Args:
        pool: The pool that is filled.
        instance: The corrected problem.
        network: Network that chooses the moves to simulate.
        begin: Plans to change first.
        value: Value to minimise.
        calls: Largest number of simulations.
        seed: Seed of the moves.
    """
    guide, done = Guide(instance, _DRAWN, seed), pool.calls + calls
    open_plans = [np.asarray(plan, dtype=np.int32) for plan in begin]
    seen: set[tuple[int, ...]] = set()
    while pool.calls + _TRIED <= done:
        if not open_plans:
            plans, step_s = pool.table()
            order = [n for n in np.argsort(value(plans, step_s)) if tuple(plans[n].tolist()) not in seen] if len(pool) else []
            if not order:
                return
            open_plans = [plans[order[0]]]
        plan = open_plans.pop(0)
        seen.add(tuple(plan.tolist()))
        done -= 1
        if guide.look(plan)[0] == np.inf:
            continue
        count = guide.draw(plan)
        with torch.no_grad():
            logits = network.scores(torch.from_numpy(guide.table[:count]))[0]
        pool.add([guide.moved(plan, k) for k in np.argsort(-logits.numpy())[:_TRIED]])


_FRESH = 10  # at every tenth trial calibration starts without the last correction, which may be a local optimum


@dataclass(frozen=True, eq=False)
class Belief:
    """The corrected problem and the plans that were measured.

    Axes: P plans, G groups.

    Attributes:
        problem: The corrected problem, with less memory where plans ran out of it.
        fit: The fit of the correction.
        plans: int32 [P, G], distinct plans with times.
        seconds: float64 [P], their measured step times, freed of drift.
        noise: float64 [P], relative standard deviation of each.
        best: Number of the fastest plan that stayed in its race.
        known: All plans that were tried, failures included.
    """

    problem: Problem
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
            return get_planner("best")(self.problem).device_of_group
        except InfeasibleError:
            return self.incumbent


class Proposer(Protocol):
    """Proposes the plan to measure next."""

    def propose(self, belief: Belief, *, calls: int, number: int) -> NDArray[np.int32] | None:
        """A plan int32 [G] that is not known yet and fits the memory; None when none is left.

        Args:
            belief: Corrected problem and measured plans.
            calls: Largest number of simulations.
            number: Number of the proposal, from 0, from which seeds follow.
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
    fit = fit_correction(campaign.problem, trials, seconds=seconds, start=start)
    noise = campaign.noise / np.sqrt([len(trial.step_s) for trial in trials])
    return Belief(
        problem=with_less_room(corrected(campaign.problem, fit.correction), campaign.trials),
        fit=fit,
        plans=np.array([trial.device_of_group for trial in trials], dtype=np.int32),
        seconds=np.array(seconds),
        noise=noise,
        best=next(n for n, trial in enumerate(trials) if trial.device_of_group == best.device_of_group),
        known=frozenset(trial.device_of_group for trial in campaign.trials),
    )


_LESS = 0.98  # of the peak that did not fit is believed to fit


def with_less_room(problem: Problem, trials: Iterable[Trial]) -> Problem:
    """The problem with smaller memories where plans ran out of memory although they should have fitted.

    Which device ran out is not known: the one whose simulated peak was nearest to its limit is blamed. No limit falls below
    what a plan that worked has needed there.

    Args:
        problem: Any problem.
        trials: Measurements of its plans.
    """
    known = list(trials)
    failed = [trial for trial in known if trial.status == "out_of_memory"]
    if not failed:
        return problem
    simulator = Simulator(problem)
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
