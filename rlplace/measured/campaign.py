"""A campaign: plans of one problem, run for real on one cluster, each at most once, within a budget.

Every trial is in the store before it begins, so that a plan that takes the whole job down is known when the job comes back: it
counts as crashed and is not tried again. What was measured is never measured twice, except a good plan, which is timed again
now and then: if it has become slower or faster, so has the cluster, and the other times are read relative to it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace.cost.timings import Mode, PlanTiming
from rlplace.errors import InputError, RlplaceError
from rlplace.interrupts import deferred_signals
from rlplace.measured.race import FIRST_NOISE, Levels, Race, level_at, pace_levels, pooled_noise, settled, upper_bound
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import FAILED, Budget, BudgetSpent, Spent, Trial
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.problem import Problem

Timer = Callable[[PlacementPlan, Race], PlanTiming]
"""Runs steps of a plan until the race is over; raises `PlanFailed` when the plan cannot run."""


class PlanFailed(RlplaceError):
    """A plan that did not run.

    Attributes:
        status: One of `rlplace.measured.trial.FAILED`.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        if status not in FAILED:
            raise ValueError(status)
        self.status = status


@dataclass(eq=False)
class Campaign:
    """Measures plans of one problem; goes on with what the store holds of its `run`.

    Attributes:
        problem: As it was priced.
        timer: Runs plans.
        store: Where trials are kept; default in memory.
        site: Fingerprint of the cluster, known to the store.
        budget: What this run may cost; default 60 plans.
        repeats: Timed steps of a plan that stays in the race.
        retime_every: Trials after which the best of the plans that were known at the last such time is timed again.
        mode: ``"computed"`` or ``"replayed"``.
        run: Name under which the campaign can be resumed.
        on_trial: Called after every trial.
        trials: What is known, in the order in which it was measured: the campaign's own trials, and those of earlier campaigns
            on the same problem and cluster.
    """

    problem: Problem
    timer: Timer
    _: KW_ONLY
    store: TrialStore = field(default_factory=TrialStore)
    site: str = ""
    budget: Budget = field(default_factory=Budget)
    repeats: int = 5
    retime_every: int = 10
    mode: Mode = "computed"
    run: str = ""
    on_trial: Callable[[Trial], None] = lambda trial: None
    trials: list[Trial] = field(init=False)

    def __post_init__(self) -> None:
        self._race = Race(repeats=self.repeats)
        self.store.add_problem(self.problem)
        for number, trial in self.store.interrupted(self.run):
            if self._mine(trial):  # not what another cluster's job of the same name may be running now
                crashed = msgspec.structs.replace(trial, status="crashed", reason="the job ended while this plan ran")
                self.store.finish(number, crashed)
        known = self.store.trials(problem=self.problem.fingerprint, site=self.site)
        self.trials = [trial for trial in known if self._mine(trial)]
        self._by_plan = {trial.device_of_group: trial for trial in self.trials if not trial.anchor}

    @property
    def spent(self) -> Spent:
        """What this run has cost, earlier parts of it included."""
        own = [trial for trial in self.trials if trial.run == self.run]
        return Spent(
            plans=sum(not trial.anchor for trial in own),
            steps=sum(len(trial.step_s) for trial in own),
            minutes=sum(trial.setup_s + sum(trial.step_s) for trial in own) / 60.0,
        )

    @property
    def share(self) -> float:
        """Share of the budget that is spent."""
        return self.spent.share(self.budget)

    @property
    def noise(self) -> float:
        """Relative standard deviation of single steps."""
        return pooled_noise([trial.step_s for trial in self.trials]) if self.trials else FIRST_NOISE

    @property
    def known_plans(self) -> list[tuple[int, ...]]:
        """All plans that were tried, failures included."""
        return list(self._by_plan)

    def known(self, devices: Sequence[int] | NDArray[np.int32]) -> Trial | None:
        """The trial of a plan, None when it has not been measured."""
        return self._by_plan.get(_plain(devices))

    def best(self) -> Trial | None:
        """The fastest plan that stayed in the race, by its time as if measured now; None when none has."""
        done = [trial for trial in self._by_plan.values() if trial.status == "done"]
        return min(done, key=self.seconds, default=None)

    def seconds(self, trial: Trial) -> float:
        """Median step time of a plan over all its trials, freed of the cluster's drift; inf when it failed."""
        if not trial.timed:
            return math.inf
        same = [t for t in self.trials if t.device_of_group == trial.device_of_group and t.timed]
        steps = [step / self.drift_at(t.began_at) for t in same for step in t.step_s]
        return float(np.median(steps))

    def drift_at(self, moment: float) -> float:
        """How much slower the cluster was at a moment than when the campaign began, by plans that were timed again."""
        return math.exp(level_at(self._levels, moment)) if self._levels else 1.0

    def measure(self, devices: Sequence[int] | NDArray[np.int32]) -> Trial:
        """Runs a plan, unless it is known.

        Args:
            devices: int [G].

        Raises:
            BudgetSpent: Nothing more may be measured.
        """
        plain = _plain(devices)
        if plain in self._by_plan:
            return self._by_plan[plain]
        if self.share >= 1.0:
            raise BudgetSpent
        trial = self._run(self._begun(plain), self._racing())
        own = sum(t.run == self.run and not t.anchor for t in self.trials)
        if self.retime_every and own % self.retime_every == 0 and self.share < 1.0:
            self.time_again(self._reference())
        return trial

    def time_again(self, trial: Trial | None = None) -> Trial | None:
        """Times a known plan once more, the best one by default; None when there is none."""
        best = trial or self.best()
        if best is None:
            return None
        again = msgspec.structs.replace(self._begun(best.device_of_group), anchor=True)
        return self._run(again, Race(repeats=self._race.repeats))

    def plan(self, trial: Trial) -> PlacementPlan:
        """The plan of a trial."""
        return make_plan(self.problem, np.array(trial.device_of_group, dtype=np.int32), planner="measured")

    def _reference(self) -> Trial | None:
        """The plan that tells whether the cluster has changed; None while any will do.

        The fastest of those that were known at the last anchor: one that was measured since may owe its time to the change, and
        would never show it.
        """
        last = max((trial.began_at for trial in self.trials if trial.anchor), default=math.inf)
        levels, noise = self._levels, self.noise
        done = [
            trial
            for trial in self._by_plan.values()
            if trial.status == "done" and trial.began_at <= last and settled(levels, trial.began_at, noise)
        ]
        return min(done, key=self.seconds, default=None)

    def _mine(self, trial: Trial) -> bool:
        """Whether a trial was made under the campaign's conditions."""
        return (trial.problem, trial.site, trial.mode) == (self.problem.fingerprint, self.site, self.mode)

    def _racing(self) -> Race:
        best = self.best()
        if best is None:
            return self._race
        now = self.drift_at(time.time())
        steps = [step / self.drift_at(best.began_at) * now for step in best.step_s]
        noise = self.noise
        return dataclasses.replace(self._race, best_s=upper_bound(steps, noise), noise=noise)

    def _begun(self, plain: tuple[int, ...]) -> Trial:
        """A trial of a plan that begins now."""
        return Trial(
            problem=self.problem.fingerprint,
            site=self.site,
            device_of_group=plain,
            status="running",
            mode=self.mode,
            began_at=time.time(),
            run=self.run,
        )

    def _run(self, trial: Trial, race: Race) -> Trial:
        # An interrupt in the middle of a step would leave the other processes waiting, and lose the measurement.
        with deferred_signals([signal.SIGINT]):
            number = self.store.begin(trial)
            trial = self._timed(number, trial, race)
            self.store.finish(number, trial)
            self._note(trial)
        return trial

    def _timed(self, number: int, trial: Trial, race: Race) -> Trial:
        """The trial with what became of it."""

        def failed(status: str, reason: str) -> Trial:
            spent_s = max(0.0, time.time() - trial.began_at)
            return msgspec.structs.replace(trial, status=status, reason=reason, setup_s=spent_s)

        try:
            timing = self.timer(self.plan(trial), race)
        except PlanFailed as error:
            return failed(error.status, str(error))
        except KeyboardInterrupt:
            self.store.discard(number)  # nobody's fault: it may be tried again
            raise
        except Exception as error:  # the job ends with it; when it comes back, this plan is not tried again
            memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            self.store.finish(number, failed("out_of_memory" if memory else "crashed", reason))
            raise
        lost = race.lost(timing.step_s) and len(timing.step_s) < race.repeats
        return msgspec.structs.replace(
            trial,
            status="dropped" if lost else "done",
            step_s=timing.step_s,
            places=timing.places,
            predicted_s=timing.predicted_s,
            engine=timing.engine,
            setup_s=timing.setup_s,
        )

    def _note(self, trial: Trial) -> None:
        self.trials.append(trial)
        vars(self).pop("_levels", None)
        if not trial.anchor:
            self._by_plan[trial.device_of_group] = trial
        self.on_trial(trial)

    @cached_property
    def _levels(self) -> Levels:
        """What `pace_levels` finds, remembered until there is another trial."""
        return pace_levels(self.trials, self._by_plan, self.noise)


def _plain(devices: Sequence[int] | NDArray[np.int32]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(device) for device in devices)
    except TypeError:
        raise InputError("campaign: a plan is a list of device numbers, one for every group") from None
