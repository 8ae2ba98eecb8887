"""A session on a real cluster: propose a strategy, run it, learn what the cluster is like, propose the next.

Every run is a process of its own (`rlplace.measure.launch`), so that a crash is a datum. What was run stands in a log before
it runs; a session with the same log goes on where it ended, and runs of earlier sessions count as its own.

Which candidate runs next: rules over a `Belief`. Each gives a number, or None where nothing is worth a run.

All weigh a run that does not fit alike: before anything has run it counts as `LOST`, the log of how much longer a step takes
than the best (a person waits for a plan that works); afterwards it keeps what there is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError, InputError
from rlplace.measure.belief import Belief, Ran
from rlplace.measure.log import Ended, Run, RunLog
from rlplace.measure.pool import FEATURES, Pool, asked_in, candidates, features, first_pool, fullest
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Strategy
from rlplace.planned import Planned
from rlplace.strategy.costs import Floats
from rlplace.strategy.drafts import Draft, draft_of_strategy
from rlplace.strategy.executor.evaluate import StepEvaluation
from rlplace.strategy.search.plan import prediction
from rlplace.strategy.search.tries import SearchProblem

LOST = math.log(3.0)

LEAST_CHANCE = 0.05
"""Candidates that are less likely to fit are not run."""

Rule = Callable[[Belief], int | None]


def expected(belief: Belief) -> int | None:
    """Calibrate and plan again: the least expected log step time, what fails counted as in `LOST` over the least of all."""
    mean, fits = belief.mean, belief.fits
    if belief.best is None:
        loss = fits * mean + (1 - fits) * (mean[fits >= LEAST_CHANCE].min(initial=math.inf) + LOST)
        return least(belief, loss)
    best = math.log(float(belief.best.step_s or 0.0))
    return least(belief, fits * np.minimum(mean - best, 0.0) + 1e-6 * mean)


def improvement(belief: Belief) -> int | None:
    """Returns the largest `gain_of`."""
    return expected(belief) if belief.best is None else least(belief, -gain_of(belief))


def gain_of(belief: Belief) -> Floats:
    """Returns float64 [C], expected improvement (Jones et al. 1998) on the log of the quickest run, times the chance that it
    fits.

    Before anything has run it is over three times the least expected step time.
    """
    from scipy.special import ndtr

    mean, spread = belief.mean, belief.spread
    best = float(mean.min()) + LOST if belief.best is None else math.log(float(belief.best.step_s or 0.0))
    z = (best - mean) / spread
    gain: Floats = (best - mean) * ndtr(z) + spread * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return gain * belief.fits


def in_order(belief: Belief) -> int | None:
    """Returns the order of the cost model, with the same margin of memory."""
    likely = np.where(belief.fits >= 0.8, 0.0, 10.0)
    return least(belief, np.log(belief.pool.by_model_s) + likely)


RULES: Mapping[str, Rule] = {"calibrate": expected, "improvement": improvement, "list": in_order}


def least(belief: Belief, loss: Floats) -> int | None:
    """Returns the least of what has not run and may fit; where nothing is likely to, the likeliest."""
    open_ = belief.left & (belief.fits >= LEAST_CHANCE)
    if not open_.any():
        return int(np.argmax(np.where(belief.left, belief.fits, -1.0))) if belief.left.any() else None
    return int(np.argmin(np.where(open_, loss, np.inf)))


AGAIN_CALLS, AGAIN_MOST = 200, 3
"""Evaluations of the search of the corrected model after every run, and strategies of its answer that join the candidates."""

FAR = 0.5
"""Standard deviations of an axis."""

Launch = Callable[[PlacementPlan], Ended]
"""Runs a plan (`rlplace.measure.launch`)."""


@dataclass(eq=False)
class Session:
    """Runs on one cluster for one question.

    Attributes:
        planned: The planner's answer and its priced model: its strategy runs among the first, and its source says what is run.
        launch: Runs a plan.
        log: Where runs are kept.
        rule: Chooses what runs next, a name of `rlplace.measure.session.RULES`.
        seed: Of the worlds.
        site: What tells clusters apart that are planned for alike.
        elsewhere: Runs of others that tell of this cluster (`telling`).
        belief: What is known.
    """

    planned: Planned
    launch: Launch
    _: KW_ONLY
    log: RunLog = field(default_factory=RunLog)
    rule: str = "improvement"
    seed: int = 0
    site: str = ""
    elsewhere: tuple[Run, ...] = ()
    belief: Belief = field(init=False)

    def __post_init__(self) -> None:
        self.plan, self.question = self.planned.plan, self.planned.search_problem
        if self.rule not in RULES:
            raise InputError(f"finetune: no rule {self.rule!r}; there are {', '.join(RULES)}")
        known = [run for run in self.log.runs if (run.question, run.site) == (self.plan.problem, self.site)]
        pool = first_pool(self.question, seed=self.seed)
        names = self.question.costs.names
        drafts = [draft_of_strategy(Strategy.from_dict(run.strategy), names) for run in known]
        assert self.plan.strategy is not None
        pool = pool.with_drafts([draft_of_strategy(self.plan.strategy, names), *drafts], self.question)
        self.belief = Belief(pool, elsewhere=self.elsewhere)
        for run, draft in zip(known, drafts, strict=True):
            if draft in pool.drafts:
                self._tell(run, pool.drafts.index(draft))

    def runs(self, count: int) -> Iterator[tuple[PlacementPlan, Run]]:
        """Runs so many strategies more, one after the other; ends earlier where nothing is worth a run."""
        for _ in range(count):
            chosen = RULES[self.rule](self.belief)
            if chosen is None:
                return
            plan = self.plan_of(chosen)
            assert plan.strategy is not None
            draft, said = self.belief.pool.drafts[chosen], self.belief.pool.said[chosen]
            begun = run_of(
                draft,
                said,
                self.question.costs.names,
                self.question.cluster,
                question=self.plan.problem,
                site=self.site,
                expected_s=math.exp(float(self.belief.mean[chosen])),
                fits=float(self.belief.fits[chosen]),
            )
            number = self.log.begin(begun)
            ended = self.launch(plan)
            run = self.log.end(number, ended)
            self._tell(run, chosen)
            self.belief = dataclasses.replace(self.belief, pool=planned_again(self.belief, self.question))
            yield plan, run

    def plan_of(self, number: int) -> PlacementPlan:
        """Returns the plan of a candidate."""
        pool = self.belief.pool
        return dataclasses.replace(
            self.plan,
            strategy=self.question.strategy(pool.drafts[number]),
            predicted=prediction(pool.said[number], self.question.batch, self.question.cluster),
            planner="session",
        )

    def best(self) -> tuple[PlacementPlan, Ran]:
        """Returns the quickest run and its plan.

        Raises:
            InfeasibleError: None has worked.
        """
        if self.belief.best is None:
            raise InfeasibleError(f"finetune: none of {len(self.belief.ran)} strategies worked; the log says why")
        return self.plan_of(self.belief.best.candidate), self.belief.best

    def left_to_gain(self) -> tuple[PlacementPlan, float] | None:
        """Returns the most promising strategy that did not run, and its expected step time; None where all have run."""
        belief = self.belief
        likely = belief.left & (belief.fits > 0.5)
        if not likely.any():
            return None
        number = int(np.argmin(np.where(likely, belief.mean, np.inf)))
        return self.plan_of(number), math.exp(float(belief.mean[number]))

    def _tell(self, run: Run, number: int) -> None:
        step_s = run.median_s
        share = run.share if run.status == "done" else None
        stages = self.belief.pool.drafts[number].stages
        busy_s = run.stage_busy_s if len(run.stage_busy_s) == stages else ()
        self.belief = self.belief.told(Ran(number, step_s, share, run.status == "out_of_memory", run.pace_s, busy_s))


def run_of(draft: Draft, said: StepEvaluation, names: Sequence[str], cluster: Cluster, **more: Any) -> Run:
    """Returns a run that has not begun.

    Args:
        draft: The strategy.
        said: What the cost model says of it.
        names: Of the blocks.
        cluster: Its devices.
        **more: Further fields of `rlplace.measure.log.Run`.
    """
    fields: dict[str, Any] = {"question": "", "site": "", "expected_s": said.step_time_s, "fits": 1.0, **more}
    return Run(
        strategy=draft.strategy(names).to_dict(),
        kinds=tuple(kind.name for kind in cluster.kinds),
        hosts=cluster.hosts,
        features=tuple(features(draft, said).tolist()),
        predicted_s=said.step_time_s,
        predicted_share=fullest(said, cluster),
        **fields,
    )


def telling(runs: Iterable[Run], cluster: Cluster) -> tuple[Run, ...]:
    """Those of runs elsewhere that tell of a cluster: they took a time on devices of the same kinds.

    Raises:
        InputError: None does, or one was written by a version with other features.
    """
    kinds = {kind.name for kind in cluster.kinds}
    done = [run for run in runs if run.median_s is not None]
    found = tuple(run for run in done if set(run.kinds) == kinds)
    if not found:
        others = ", ".join(sorted({"+".join(sorted(set(run.kinds))) for run in done})) or "nothing that worked"
        raise InputError(
            f"runs elsewhere tell nothing of {'+'.join(sorted(kinds))}: they hold {others}; "
            "leave them out, or name files with runs on devices of these kinds"
        )
    for run in found:
        if len(run.features) != len(FEATURES):
            raise InputError(
                f"a run elsewhere has {len(run.features)} features of its strategy, this version {len(FEATURES)}; "
                "leave out its file, or export it with this version"
            )
    return found


def planned_again(belief: Belief, question: SearchProblem) -> Pool:
    """Returns the candidates, with those that a search of the corrected model proposes besides.

    Where that is far from the world around which step times are linear, they are taken around it: a strategy that spares a
    slow host looks slow by its slopes around hosts that are alike.
    """
    pool = belief.pool
    if np.abs(belief.axes - pool.worlds.center).max() > FAR:
        pool = pool.around(belief.axes, question)
        belief = dataclasses.replace(belief, pool=pool)
    try:
        found = candidates(asked_in(belief.world(), question), AGAIN_CALLS, AGAIN_MOST)
    except InfeasibleError:  # as the cluster is believed to be, nothing fits; what is left of the pool is tried
        return pool
    return pool.with_drafts(found, question)
