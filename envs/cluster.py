"""``rlplace/Cluster-v0``: which strategy to run next on a cluster whose truth is hidden.

An episode is a model on a cluster. The planner has proposed candidates; the cost model says what they take, and is wrong by
something that is drawn anew in each episode (`rlplace.measure.world`), or was measured (`Scenario.replayed`). An action runs
a candidate, which shows its step time and memory or that it does not fit, or stops. The observation is the belief after all
runs (`rlplace.measure.belief`), as a graph: a node for each candidate (what it is expected to take, how sure that is, whether
it will fit, what it took), the correlation of any two, and the stages of each one's plan with the places that hold them. K
candidates and one action to stop, S stages at most. Step times are linear around the cost model, where a session of real runs
follows its belief.

What a policy sees in `rlplace/Cluster-v0`: candidates as the nodes of a graph, and each one's plan as a graph of stages.

C candidates, with room for K and one more row for the action to stop; S stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.envs.guide.features import CLIP
from rlplace.envs.instance import FinalReward, log_ratio
from rlplace.envs.observation import NUM_CONTEXT
from rlplace.errors import InputError
from rlplace.measure.belief import LOST, Belief, Observation, expected_improvement
from rlplace.measure.log import Run
from rlplace.measure.pool import CHOICES, Pool, first_pool, pool_of
from rlplace.measure.world import NOISE, Truth, Worlds
from rlplace.plan.strategy import Strategy
from rlplace.strategy.costs import Floats
from rlplace.strategy.drafts import Draft, draft_of_strategy
from rlplace.strategy.executor.evaluate import PARTS, StepEvaluation
from rlplace.strategy.search.tries import SearchProblem


@dataclass(frozen=True, eq=False)
class Scenario:
    """An episode: candidates, and what they take.

    Attributes:
        pool: The candidates.
        step_s: float64 [C], true step times.
        share: float64 [C], true shares of the fullest device's memory; above 1 a run does not fit.
        pace_s: By device, what a run shows of its speed; see `rlplace.measure.belief.Observation`.
        stage_busy_s: By candidate and stage, likewise.
    """

    pool: Pool
    step_s: Floats
    share: Floats
    pace_s: tuple[float, ...] = ()
    stage_busy_s: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def of(pool: Pool, truth: Truth) -> Scenario:
        """Returns a truth for all candidates."""
        step_s = np.array([truth.step_s(draft) for draft in pool.drafts])
        share = np.array([truth.share(draft) for draft in pool.drafts])
        busy_s = tuple(truth.stage_busy_s(draft) for draft in pool.drafts)
        return Scenario(pool, step_s, share, truth.pace_s(np.random.default_rng(truth.seed)), busy_s)

    @staticmethod
    def replayed(question: SearchProblem, runs: Sequence[Run]) -> Scenario:
        """Returns the scenario of a log of real runs: the strategies that ran and those that did not fit.

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
def default_questions() -> tuple[SearchProblem, ...]:
    """Returns a perceptron of the zoo, 60 samples a step, on four A100s, on two of them with two T4s, and on two hosts of two
    T4s.
    """
    from rlplace.cluster.parse import parse
    from rlplace.model.capture.capture import capture
    from rlplace.model.zoo import load_model
    from rlplace.strategy.search.plan import ask

    loaded = [load_model("zoo:mlp,layers=12,width=8192", batch=batch) for batch in (2, 4)]
    first, other = (capture(one.module, one.example_inputs, loss=one.loss) for one in loaded)
    return tuple(ask(first, parse(text), 60, other=other) for text in ("a100-80g:4", "a100-80g:2+t4:2", "t4:2x2,eth=25g"))


@cache
def default_scenarios() -> tuple[Scenario, ...]:
    """Returns the first of these questions, and sixteen truths."""
    question = default_questions()[0]
    pool = first_pool(question, calls=100)
    made = (Scenario.of(pool, Truth.drawn(question, seed)) for seed in range(16))
    return tuple(scenario for scenario in made if math.isfinite(scenario.least_s))


FEATURES = (
    "expected_gain", "expected", "spread", "fits", "full", "by_the_model", "tells", "ran", "took",
    *(f"of {name}" for name in CHOICES), *(f"in {part}" for part in PARTS),
)  # fmt: skip
"""Of a candidate: `rlplace.measure.belief.expected_improvement`; expected log step time over the best that ran; its standard
deviation; the chance that it fits; log of its share of memory; log step time by the cost model over the least; how much it
tells of others; whether it has run, and the log of its step time over that by the cost model; its strategy, and shares of its
step."""

STAGE_FEATURES = ("busy", "blocks", "replicas", "shared", "tensor", "level", "recomputed", "full")
"""Of a stage: its passes over the step by the cost model; share of the blocks; degrees, as logarithms to base 2; sharding level
over 3; share of its blocks that are recomputed; share of the memory of its fullest device."""


def stages_of(draft: Draft, said: StepEvaluation, cluster: Cluster) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Returns a plan as a graph: float32 [S, `STAGE_FEATURES`], and int32 [S], the place that holds each stage."""
    rows: list[list[float]] = []
    held: list[int] = []
    blocks, first = len(draft.recompute), 0
    for one in draft.pipelines:
        for stage, place_number in enumerate(one.place_of_stage):
            place, own = one.places[place_number], slice(one.bounds[stage], one.bounds[stage + 1])
            again = one.recompute[own]
            full = max(said.peak_memory_bytes[d] / (cluster.devices[d].memory_bytes or math.inf) for d in place.devices)
            rows.append(
                [
                    said.stage_busy_s[len(rows)] / said.step_time_s, len(again) / blocks, math.log2(place.replicate),
                    math.log2(place.shard), math.log2(place.tensor), place.sharding / 3.0,
                    sum(map(bool, again)) / max(1, len(again)), full,
                ]
            )  # fmt: skip
            held.append(first + place_number)
        first += len(one.places)
    return np.array(rows, dtype=np.float32), np.array(held, dtype=np.int32)


def plan_graphs(pool: Pool, candidates: int, stages: int) -> dict[str, NDArray[Any]]:
    """Returns the part of an observation that stays: float32 ``stages`` [(K + 1) S F], and int32 ``place`` [(K + 1) S] (-1:
    none).
    """
    table = np.zeros((candidates + 1, stages, len(STAGE_FEATURES)), dtype=np.float32)
    place = np.full((candidates + 1, stages), -1, dtype=np.int32)
    for number in range(len(pool.drafts)):
        rows, held = stages_of(pool.drafts[number], pool.steps[number], pool.worlds.cluster)
        table[number, : len(rows)], place[number, : len(rows)] = rows[:stages], held[:stages]
    return {"stages": np.clip(table, -CLIP, CLIP).ravel(), "place": place.ravel()}


def observe(belief: Belief, runs: int, candidates: int) -> dict[str, NDArray[Any]]:
    """Returns the part of an observation that follows the belief.

    Args:
        belief: After all runs so far.
        runs: Most runs of the session.
        candidates: K, for which there is room.

    Returns:
        float32 ``candidates`` [(K + 1) F], int32 ``candidate_group`` [K + 1] (-1: has run, or to stop), float32 ``alike``
        [(K + 1)^2], correlations of log step times, and ``context`` [C].
    """
    pool, count = belief.pool, len(belief.pool.drafts)
    mean, spread, fits = belief.mean, belief.std, belief.fits
    likely = fits >= 0.5
    base = math.log(float(belief.best.step_s or 0.0)) if belief.best else float(mean[likely].min(initial=mean.max()))
    correlation = belief.covariance / np.outer(spread, spread)
    others = np.abs(correlation)
    alike = np.zeros((candidates + 1, candidates + 1), dtype=np.float32)
    alike[:count, :count] = np.clip(correlation, -1.0, 1.0)
    ran, took, by_model = np.zeros(count), np.zeros(count), np.log(pool.by_model_s)
    for one in belief.observations:
        ran[one.candidate] = 1.0
        took[one.candidate] = 0.0 if one.step_s is None else math.log(one.step_s) - by_model[one.candidate]
    columns = [
        expected_improvement(belief), mean - base, spread, fits, np.log(np.maximum(pool.share, 1e-3)),
        by_model - by_model.min(), others.mean(axis=1), ran, took, *pool.features.T,
    ]  # fmt: skip
    table = np.zeros((candidates + 1, len(FEATURES)), dtype=np.float32)
    table[:count] = np.clip(np.stack(columns, axis=1), -CLIP, CLIP)
    group = np.full(candidates + 1, -1, dtype=np.int32)
    group[:count] = np.where(belief.untried, np.arange(count), -1)
    lost = sum(ran.step_s is None for ran in belief.observations)
    context = [
        len(belief.observations) / runs, lost / runs, float(belief.best is not None), float(spread.mean()), float(spread.min()),
        float(mean[likely].min(initial=base) - base), float(fits.mean()), math.log2(count) / 8.0,
    ]  # fmt: skip
    found = np.clip(np.array(context, dtype=np.float32), -CLIP, CLIP)
    return {"candidates": table.ravel(), "candidate_group": group, "alike": alike.ravel(), "context": found}


class ClusterEnv(gymnasium.Env[dict[str, NDArray[Any]], np.int64]):
    """See the module.

    Attributes:
        FEATURES: Names of the columns of a candidate.
        STAGE_FEATURES: Of a stage of its plan.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012
    FEATURES, STAGE_FEATURES = FEATURES, STAGE_FEATURES

    def __init__(
        self,
        scenarios: Sequence[Scenario] | None = None,
        *,
        runs: int = 5,
        run_cost: float = 0.005,
        loss_cost: float = 0.01,
        reward: FinalReward = log_ratio,
        render_mode: str | None = None,
    ) -> None:
        """An environment over scenarios.

        Args:
            scenarios: Episodes; one is drawn at each reset. Default: a small model on four A100s with sixteen truths.
            runs: Most runs of an episode.
            run_cost: Of every run, as a log of throughput.
            loss_cost: Of a run that does not fit, besides.
            reward: Called with the true step time of the quickest run and the least of all candidates; a run is rewarded by
                how much that rises, from -`LOST` before any run, less its cost.
            render_mode: ``"ansi"`` or None.

        Raises:
            InputError: There is no scenario, or one in which nothing fits.
        """
        scenarios = default_scenarios() if scenarios is None else scenarios
        if not scenarios or any(math.isinf(scenario.least_s) for scenario in scenarios):
            raise InputError("Cluster-v0 needs scenarios, each with a candidate that fits; leave the others out")
        self.scenarios = list(scenarios)
        self._reward = reward
        self.runs, self.run_cost, self.loss_cost, self.render_mode = runs, run_cost, loss_cost, render_mode
        self.candidates = max(len(scenario.pool.drafts) for scenario in scenarios)
        most = self.candidates + 1
        self.stages = max(sum(one.stages for one in d.pipelines) for scenario in scenarios for d in scenario.pool.drafts)
        self._graphs = cache(lambda pool: plan_graphs(pool, self.candidates, self.stages))
        self.action_space = spaces.Discrete(most)
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {
                "candidates": spaces.Box(-CLIP, CLIP, (most * len(self.FEATURES),), np.float32),
                "candidate_group": spaces.Box(-1, most, (most,), np.int32),
                "alike": spaces.Box(-1.0, 1.0, (most * most,), np.float32),
                "stages": spaces.Box(-CLIP, CLIP, (most * self.stages * len(STAGE_FEATURES),), np.float32),
                "place": spaces.Box(-1, 1 << 16, (most * self.stages,), np.int32),
                "context": spaces.Box(-CLIP, CLIP, (NUM_CONTEXT,), np.float32),
            }
        )
        self.scenario = self.scenarios[0]
        self.belief, self._turns = Belief(self.scenario.pool), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Begins an episode; ``options={"scenario": n}`` chooses it."""
        super().reset(seed=seed)
        number = (options or {}).get("scenario")
        self.scenario = self.scenarios[int(self.np_random.integers(len(self.scenarios))) if number is None else number]
        self.belief, self._turns = Belief(self.scenario.pool), 0
        return self._observe(), self._info()

    def step(self, action: np.int64 | int) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Runs a candidate, or stops."""
        self._turns += 1
        over = self._turns >= min(self.runs, len(self.scenario.pool.drafts))
        if not self.action_masks()[action]:  # tells nothing, and costs what a run costs
            return self._observe(), -self.run_cost, over, False, self._info()
        if action == self.candidates:
            return self._observe(), 0.0, True, False, self._info()
        before, scenario = self._worth(), self.scenario
        share = float(scenario.share[action])
        fits = share <= 1.0
        step_s = float(scenario.step_s[action] * math.exp(self.np_random.normal(0.0, NOISE))) if fits else None
        busy_s = scenario.stage_busy_s[action] if fits and scenario.stage_busy_s else ()
        self.belief = self.belief.update(
            Observation(int(action), step_s, share if fits else None, not fits, scenario.pace_s if fits else (), busy_s)
        )
        reward = self._worth() - before - self.run_cost - (0.0 if fits else self.loss_cost)
        return self._observe(), reward, over, False, self._info()

    def _quickest_s(self) -> float:
        """Returns the true step time of the quickest run; inf before any."""
        done = [ran.candidate for ran in self.belief.observations if ran.step_s is not None]
        return float(self.scenario.step_s[done].min(initial=math.inf))

    @property
    def over(self) -> float:
        """Log of the true step time of the quickest run over the least of all candidates."""
        return min(LOST, math.log(self._quickest_s() / self.scenario.least_s))

    def _worth(self) -> float:
        """Returns the `reward` of the quickest run."""
        quickest_s = self._quickest_s()
        return -LOST if quickest_s == math.inf else max(-LOST, self._reward(quickest_s, self.scenario.least_s))

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns bool [K + 1]: what has not run yet, and to stop once something has."""
        mask = np.zeros(self.candidates + 1, dtype=bool)
        mask[: len(self.belief.pool.drafts)] = self.belief.untried
        mask[-1] = self.belief.best is not None or not mask.any()
        return mask

    def render(self) -> str | None:
        """Returns the runs so far, one a line."""
        if self.render_mode is None:
            return None
        lines = [
            f"candidate {ran.candidate}: " + ("out of memory" if ran.step_s is None else f"{1e3 * ran.step_s:.3f} ms")
            for ran in self.belief.observations
        ]
        return "\n".join([*lines, f"{100 * math.expm1(self.over):.1f} % over the best"])

    def _observe(self) -> dict[str, NDArray[Any]]:
        graphs = {name: value.copy() for name, value in self._graphs(self.scenario.pool).items()}
        return {**observe(self.belief, self.runs, self.candidates), **graphs}

    def _info(self) -> dict[str, Any]:
        return {
            "over": math.exp(self.over),
            "runs": len(self.belief.observations),
            "lost": sum(r.step_s is None for r in self.belief.observations),
        }
