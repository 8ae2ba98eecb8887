"""A campaign: plans of one problem, run for real on one cluster, each at most once, within a budget.

Every trial is in the store before it begins, so that a plan that takes the whole job down is known when the job comes back: it
counts as crashed and is not tried again. What was measured is never measured twice, except a good plan, which is timed again
now and then: if it has become slower or faster, so has the cluster, and the other times are read relative to it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError, RlplaceError
from rlplace.interrupts import deferred_signals
from rlplace.measured.race import FIRST_NOISE, MEDIAN_LOSS, Race, Z, pooled_noise, upper_bound
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import FAILED, Trial
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.planners.common.evaluate import PLAIN, Execution
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


class BudgetSpent(Exception):
    """The campaign may measure nothing more."""


@dataclass(frozen=True)
class Budget:
    """What a campaign may cost; None: no limit.

    Attributes:
        plans: Plans measured, failures included; timing a known plan again is not counted.
        steps: Timed steps, repeated timings included.
        minutes: Of measuring: set-up and steps, as the trials say; of a plan that failed all that it took.
    """

    plans: int | None = 60
    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("plans", "steps", "minutes"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise InputError(f"budget: {name} must be above 0, found {value!r}")


@dataclass(frozen=True)
class Spent:
    """What a campaign has cost so far; fields as in `Budget`."""

    plans: int = 0
    steps: int = 0
    minutes: float = 0.0

    def share(self, budget: Budget) -> float:
        """Of the limit that is nearest, from 0 to 1."""
        pairs = ((getattr(self, name), getattr(budget, name)) for name in ("plans", "steps", "minutes"))
        return min(1.0, max((done / limit for done, limit in pairs if limit is not None), default=0.0))


class Campaign:
    """Measures plans of one problem.

    Attributes:
        problem: As it was priced.
        execution: Micro-batches and schedule of the step.
        trials: What is known, in the order in which it was measured: the campaign's own trials, and unless it is isolated
            those of earlier campaigns on the same problem and cluster.
        on_trial: Called after every trial.
        budget: What this run may cost.
    """

    def __init__(
        self,
        problem: Problem,
        timer: Timer,
        *,
        store: TrialStore | None = None,
        site: str = "",
        execution: Execution = PLAIN,
        budget: Budget | None = None,
        repeats: int = 5,
        retime_every: int = 10,
        mode: str = "computed",
        run: str = "",
        isolated: bool = False,
        on_trial: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        """Opens the campaign; goes on with what the store holds of `run`.

        Args:
            problem: The problem.
            timer: Runs plans.
            store: Where trials are kept; None: in memory.
            site: Fingerprint of the cluster, known to the store.
            execution: Micro-batches and schedule of the step.
            budget: Default 60 plans.
            repeats: Timed steps of a plan that stays in the race.
            retime_every: Trials after which the best of the plans that were known at the last such time is timed again.
            mode: ``"computed"`` or ``"replayed"``.
            run: Name under which the campaign can be resumed.
            isolated: Do not learn from other campaigns' trials; what they have measured is taken from the store instead of
                measuring it again and counts as measured. For comparisons.
            on_trial: Called after every trial.
        """
        self.problem, self.execution, self.mode, self.run = problem, execution, mode, run
        self.on_trial = on_trial
        self.budget = budget or Budget()
        self._timer, self._isolated = timer, isolated
        self._race, self._retime_every = Race(repeats=repeats), retime_every
        self._store, self._site = store or TrialStore(None), site
        self._store.add_problem(problem)
        for number, trial in self._store.interrupted(run):
            if not self._mine(trial):
                continue  # another cluster's job of the same name may be running it now
            crashed = dataclasses.replace(trial, status="crashed", reason="the job ended while this plan ran")
            self._store.finish(number, crashed)
        known = self._store.trials(problem=problem.fingerprint, site=site, run=run if isolated else None)
        self.trials = [trial for trial in known if self._mine(trial)]
        self._by_plan = {trial.device_of_group: trial for trial in self.trials if not trial.anchor}
        self._known_levels: tuple[int, list[tuple[float, float]]] | None = None

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
        """Of the budget that is spent."""
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
        levels = self._levels()
        return math.exp(_level(levels, moment)) if levels else 1.0

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
        trial = (self._from_store(plain) if self._isolated else None) or self._run(plain, self._racing())
        own = sum(t.run == self.run and not t.anchor for t in self.trials)
        if self._retime_every and own % self._retime_every == 0 and self.share < 1.0:
            self.time_again(self._reference())
        return trial

    def time_again(self, trial: Trial | None = None) -> Trial | None:
        """Times a known plan once more, the best one by default; None when there is none."""
        best = trial or self.best()
        if best is None:
            return None
        return self._run(best.device_of_group, Race(repeats=self._race.repeats), anchor=True)

    def plan(self, trial: Trial) -> PlacementPlan:
        """The plan of a trial."""
        return make_plan(
            self.problem, np.array(trial.device_of_group, dtype=np.int32), planner="measured", **self.execution.arguments
        )

    def _reference(self) -> Trial | None:
        """The plan that tells whether the cluster has changed; None while any will do.

        The fastest of those that were known at the last anchor: one that was measured since may owe its time to the change, and
        would never show it.
        """
        last = max((trial.began_at for trial in self.trials if trial.anchor), default=math.inf)
        levels, noise = self._levels(), self.noise
        done = [
            trial
            for trial in self._by_plan.values()
            if trial.status == "done" and trial.began_at <= last and _settled(levels, trial.began_at, noise)
        ]
        return min(done, key=self.seconds, default=None)

    def _mine(self, trial: Trial) -> bool:
        """Whether a trial was made under the campaign's conditions."""
        conditions = (self.problem.fingerprint, self._site, self.mode, self.execution.microbatches, self.execution.schedule)
        return (trial.problem, trial.site, trial.mode, trial.microbatches, trial.schedule) == conditions

    def _racing(self) -> Race:
        best = self.best()
        if best is None:
            return self._race
        now = self.drift_at(time.time())
        steps = [step / self.drift_at(best.began_at) * now for step in best.step_s]
        noise = self.noise
        return dataclasses.replace(self._race, best_s=upper_bound(steps, noise), noise=noise)

    def _run(self, plain: tuple[int, ...], race: Race, *, anchor: bool = False) -> Trial:
        trial = Trial(
            problem=self.problem.fingerprint,
            site=self._site,
            device_of_group=plain,
            microbatches=self.execution.microbatches,
            schedule=self.execution.schedule,
            status="running",
            mode=self.mode,
            began_at=time.time(),
            run=self.run,
            anchor=anchor,
        )
        # An interrupt in the middle of a step would leave the other processes waiting, and lose the measurement.
        with deferred_signals([signal.SIGINT]):
            number = self._store.begin(trial)
            trial = self._timed(number, trial, race)
            self._store.finish(number, trial)
            self._note(trial)
        return trial

    def _timed(self, number: int, trial: Trial, race: Race) -> Trial:
        """The trial with what became of it."""
        try:
            timing = self._timer(self.plan(trial), race)
        except PlanFailed as error:
            return dataclasses.replace(trial, status=error.status, reason=str(error), setup_s=self._since(trial))
        except KeyboardInterrupt:
            self._store.discard(number)  # nobody's fault: it may be tried again
            raise
        except Exception as error:  # the job ends with it; when it comes back, this plan is not tried again
            memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            status = "out_of_memory" if memory else "crashed"
            self._store.finish(number, dataclasses.replace(trial, status=status, reason=reason, setup_s=self._since(trial)))
            raise
        lost = race.lost(timing.step_s) and len(timing.step_s) < race.repeats
        return dataclasses.replace(
            trial,
            status="dropped" if lost else "done",
            step_s=timing.step_s,
            places=timing.places,
            predicted_s=timing.predicted_s,
            engine=timing.engine,
            setup_s=timing.setup_s,
        )

    @staticmethod
    def _since(trial: Trial) -> float:
        """Seconds since a trial began: what a failure costs."""
        return max(0.0, time.time() - trial.began_at)

    def _from_store(self, plain: tuple[int, ...]) -> Trial | None:
        found = self._store.lookup(
            problem=self.problem.fingerprint, site=self._site, device_of_group=plain, mode=self.mode,
            microbatches=self.execution.microbatches, schedule=self.execution.schedule, priority=None,
        )  # fmt: skip
        if found is None:
            return None
        found = dataclasses.replace(found, run=self.run)
        self._store.add(found)
        self._note(found)
        return found

    def _note(self, trial: Trial) -> None:
        self.trials.append(trial)
        if not trial.anchor:
            self._by_plan[trial.device_of_group] = trial
        self.on_trial(trial)

    def _levels(self) -> list[tuple[float, float]]:
        """What `_ratios` finds, remembered until there is another trial."""
        if self._known_levels is None or self._known_levels[0] != len(self.trials):
            self._known_levels = len(self.trials), self._ratios()
        return self._known_levels[1]

    def _ratios(self) -> list[tuple[float, float]]:
        """(moment, log of slowdown since the beginning), by moment, from every plan that was timed again.

        A plan's earlier times stand at the level that the anchors before them had found, so a chain of changing best plans
        tells the drift of the whole campaign. Plans that were first timed while the cluster changed tell nothing: nobody knows
        whether that was before the change or after it. An anchor that agrees with a known level within doubt is at that level.
        The first time of a plan is doubted more: it is timed again because that time was good, some of which was luck.
        """
        noise = self.noise
        luck = math.sqrt(2.0 * math.log(max(2, len(self._by_plan))))  # of the luckiest of so many, in standard deviations
        found: list[tuple[float, float]] = []
        earlier: dict[tuple[int, ...], list[Trial]] = {}
        for anchor in sorted((t for t in self.trials if t.anchor and t.timed), key=lambda t: t.began_at):
            first = self._by_plan.get(anchor.device_of_group)
            if first is None or not first.timed or first.began_at >= anchor.began_at:
                continue
            if not _settled(found, first.began_at, noise):
                continue
            if not found:
                found.append((first.began_at, 0.0))
            before = earlier.setdefault(anchor.device_of_group, [first])
            steps = [math.log(step) - _level(found, trial.began_at) for trial in before for step in trial.step_s]
            value = math.log(anchor.median_s) - float(np.median(steps))
            doubt = MEDIAN_LOSS * noise * Z * math.sqrt(1 / len(anchor.step_s) + 1 / len(steps))
            lucky = MEDIAN_LOSS * noise * luck * math.sqrt(len(first.step_s)) / len(steps)
            near = min((level for _, level in found), key=lambda level: abs(value - level))
            found.append((anchor.began_at, near if -doubt <= value - near <= doubt + lucky else value))
            before.append(anchor)
        return found


def _level(levels: list[tuple[float, float]], moment: float) -> float:
    """Log of the slowdown at a moment."""
    at, log_ratio = zip(*levels, strict=True)
    return float(np.interp(moment, at, log_ratio))


def _settled(levels: list[tuple[float, float]], moment: float, noise: float) -> bool:
    """Whether the cluster was as fast at the anchor before a moment as at the one after it."""
    later = bisect.bisect_left(levels, (moment,))
    return later in (0, len(levels)) or abs(levels[later][1] - levels[later - 1][1]) <= Z * noise


def _plain(devices: Sequence[int] | NDArray[np.int32]) -> tuple[int, ...]:
    return tuple(int(device) for device in devices)
