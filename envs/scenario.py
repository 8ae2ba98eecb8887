"""Episodes of `rlplace/Cluster-v0`: candidates, and what they take on a cluster that is made up or was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from rlplace.measure.log import Run
from rlplace.measure.pool import Pool, first_pool, pool_of
from rlplace.measure.truths import Truth
from rlplace.measure.world import Worlds
from rlplace.plan.strategy import Strategy
from rlplace.strategy.costs import Floats
from rlplace.strategy.drafts import draft_of_strategy
from rlplace.strategy.search.tries import Question


@dataclass(frozen=True, eq=False)
class Scenario:
    """An episode: candidates, and what they take.

    Attributes:
        pool: The candidates.
        step_s: float64 [C], true step times.
        share: float64 [C], true shares of the fullest device's memory; above 1 a run does not fit.
        pace_s: By device, what a run shows of its speed; see `rlplace.measure.belief.Ran`.
        stage_busy_s: By candidate and stage, likewise.
    """

    pool: Pool
    step_s: Floats
    share: Floats
    pace_s: tuple[float, ...] = ()
    stage_busy_s: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def of(pool: Pool, truth: Truth) -> Scenario:
        """A truth for all candidates."""
        step_s = np.array([truth.step_s(draft) for draft in pool.drafts])
        share = np.array([truth.share(draft) for draft in pool.drafts])
        busy_s = tuple(truth.stage_busy_s(draft) for draft in pool.drafts)
        return Scenario(pool, step_s, share, truth.pace_s(np.random.default_rng(truth.seed)), busy_s)

    @staticmethod
    def replayed(question: Question, runs: Sequence[Run]) -> Scenario:
        """What a log of real runs has measured: its strategies, those that ran and those that did not fit.

        Args:
            question: That of the runs.
            runs: Of one site; the last word on a strategy counts.

        Raises:
            InputError: A run's strategy has other blocks than the question.
        """
        told = {
            draft_of_strategy(Strategy.from_dict(run.strategy), question.costs.names): run
            for run in runs
            if run.status in ("done", "out_of_memory")
        }
        pool = pool_of(list(told), question, Worlds.of(question.costs, question.cluster))
        known = [told[draft] for draft in pool.drafts]
        shares = zip(known, pool.share.tolist(), strict=True)
        return Scenario(
            pool,
            np.array([run.median_s or math.inf for run in known]),
            np.array([math.inf if run.median_s is None else min(1.0, run.share or share) for run, share in shares]),
            next((run.pace_s for run in known if run.pace_s), ()),
            tuple(run.stage_busy_s if len(run.stage_busy_s) == draft.stages else () for draft, run in told.items()),
        )

    @property
    def least_s(self) -> float:
        """The least step time of what fits; inf where nothing does."""
        return float(self.step_s[self.share <= 1.0].min(initial=math.inf))


@cache
def default_questions() -> tuple[Question, ...]:
    """A perceptron of the zoo, 60 samples a step, on four A100s, on two of them with two T4s, and on two hosts of two T4s."""
    from rlplace.cluster.parse import parse
    from rlplace.model.capture.capture import capture
    from rlplace.model.zoo import load_model
    from rlplace.strategy.search.plan import ask

    loaded = [load_model("zoo:mlp,layers=12,width=8192", batch=batch) for batch in (2, 4)]
    first, other = (capture(one.module, one.example_inputs, loss=one.loss) for one in loaded)
    return tuple(ask(first, parse(text), 60, other=other) for text in ("a100-80g:4", "a100-80g:2+t4:2", "t4:2x2,eth=25g"))


@cache
def default_scenarios() -> tuple[Scenario, ...]:
    """The first of these questions, and sixteen truths."""
    question = default_questions()[0]
    pool = first_pool(question, calls=100)
    made = (Scenario.of(pool, Truth.drawn(question, seed)) for seed in range(16))
    return tuple(scenario for scenario in made if math.isfinite(scenario.least_s))
