"""``rlplace/Cluster-v0``: which strategy to run next on a cluster whose truth is hidden.

An episode is a model on a cluster. The planner has proposed candidates; the cost model says what they take, and is wrong by
something that is drawn anew in each episode (`rlplace.measured.truths`). An action runs a candidate, which shows its step
time and memory or that it does not fit, or stops. The observation is the belief after all runs (`rlplace.measured.belief`):
for every candidate what it is expected to take, how sure that is, whether it will fit, what it would tell about others, and
its strategy. K candidates and one action to stop.
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

from rlplace.envs.guide.features import CLIP
from rlplace.envs.observation import NUM_CONTEXT
from rlplace.errors import InputError
from rlplace.measured import pool as pools
from rlplace.measured.belief import Belief, Ran
from rlplace.measured.choose import LOST, gain_of
from rlplace.measured.pool import Pool
from rlplace.measured.truths import NOISE, Truth
from rlplace.strategy.costs import Floats


@dataclass(frozen=True, eq=False)
class Scenario:
    """An episode: candidates, and what they take.

    Attributes:
        pool: The candidates.
        step_s: float64 [C], true step times.
        share: float64 [C], true shares of the fullest device's memory; above 1 a run does not fit.
        pace_s: By device, what a run shows of its speed; see `rlplace.measured.belief.Ran`.
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

    @property
    def least_s(self) -> float:
        """The least step time of what fits; inf where nothing does."""
        return float(self.step_s[self.share <= 1.0].min(initial=math.inf))


FEATURES = (
    "expected_gain", "expected", "spread", "fits", "full", "by_the_model", "tells", *(f"of {name}" for name in pools.FEATURES),
)  # fmt: skip
"""Of a candidate: `rlplace.measured.choose.gain_of`; expected log step time over the best that ran; its standard deviation; the
chance that it fits; log of its share of memory; log step time by the cost model over the least; how much it tells of others;
its strategy."""


def observe(belief: Belief, runs: int, candidates: int) -> dict[str, NDArray[Any]]:
    """What a policy sees of a belief.

    Args:
        belief: After all runs so far.
        runs: Most runs of the session.
        candidates: K, for which there is room.

    Returns:
        float32 ``candidates`` [(K + 1) F], int32 ``candidate_group`` [K + 1] (-1: has run, or to stop) and ``context`` [C].
    """
    pool, count = belief.pool, len(belief.pool.drafts)
    mean, spread, fits = belief.mean, belief.spread, belief.fits
    likely = fits >= 0.5
    base = math.log(float(belief.best.step_s or 0.0)) if belief.best else float(mean[likely].min(initial=mean.max()))
    others = np.abs(belief.cover) / np.outer(spread, spread)
    columns = [
        gain_of(belief), mean - base, spread, fits, np.log(np.maximum(pool.share, 1e-3)),
        pool.log_s[0] - pool.log_s[0].min(), others.mean(axis=1), *pool.features.T,
    ]  # fmt: skip
    table = np.zeros((candidates + 1, len(FEATURES)), dtype=np.float32)
    table[:count] = np.clip(np.stack(columns, axis=1), -CLIP, CLIP)
    group = np.full(candidates + 1, -1, dtype=np.int32)
    group[:count] = np.where(belief.left, np.arange(count), -1)
    lost = sum(ran.step_s is None for ran in belief.ran)
    context = [
        len(belief.ran) / runs, lost / runs, float(belief.best is not None), float(spread.mean()), float(spread.min()),
        float(mean[likely].min(initial=base) - base), float(fits.mean()), math.log2(count) / 8.0,
    ]  # fmt: skip
    found = np.clip(np.array(context, dtype=np.float32), -CLIP, CLIP)
    return {"candidates": table.ravel(), "candidate_group": group, "context": found}


@cache
def default_scenarios() -> tuple[Scenario, ...]:
    """A small model of the zoo on four A100s, and sixteen truths."""
    from rlplace.cluster.parse import parse
    from rlplace.graph.capture import capture
    from rlplace.strategy.plan import ask
    from rlplace.zoo import load_model

    loaded = [load_model("zoo:mlp", batch=batch) for batch in (2, 4)]
    first, other = (capture(one.module, one.example_inputs, loss=one.loss) for one in loaded)
    question = ask(first, parse("a100-80g:4"), 64, other=other)
    pool = pools.first_pool(question, calls=100, draws=16)
    made = (Scenario.of(pool, Truth.drawn(question, seed)) for seed in range(16))
    return tuple(scenario for scenario in made if math.isfinite(scenario.least_s))


class ClusterEnv(gymnasium.Env[dict[str, NDArray[Any]], np.int64]):
    """See the module.

    Attributes:
        FEATURES: Names of the columns of a candidate.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012
    FEATURES = FEATURES

    def __init__(
        self,
        scenarios: Sequence[Scenario] | None = None,
        *,
        runs: int = 5,
        run_cost: float = 0.005,
        loss_cost: float = 0.01,
        render_mode: str | None = None,
    ) -> None:
        """An environment over scenarios.

        Args:
            scenarios: Episodes; one is drawn at each reset. Default: a small model on four A100s with sixteen truths.
            runs: Most runs of an episode.
            run_cost: Of every run, as a log of throughput.
            loss_cost: Of a run that does not fit, besides.
            render_mode: ``"ansi"`` or None.

        Raises:
            InputError: There is no scenario, or one in which nothing fits.
        """
        scenarios = default_scenarios() if scenarios is None else scenarios
        if not scenarios or any(math.isinf(scenario.least_s) for scenario in scenarios):
            raise InputError("Cluster-v0 needs scenarios, each with a candidate that fits; leave the others out")
        self.scenarios = list(scenarios)
        self.runs, self.run_cost, self.loss_cost, self.render_mode = runs, run_cost, loss_cost, render_mode
        self.candidates = max(len(scenario.pool.drafts) for scenario in scenarios)
        most = self.candidates + 1
        self.action_space = spaces.Discrete(most)
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {
                "candidates": spaces.Box(-CLIP, CLIP, (most * len(self.FEATURES),), np.float32),
                "candidate_group": spaces.Box(-1, most, (most,), np.int32),
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
        before, scenario = self.over, self.scenario
        share = float(scenario.share[action])
        fits = share <= 1.0
        step_s = float(scenario.step_s[action] * math.exp(self.np_random.normal(0.0, NOISE))) if fits else None
        busy_s = scenario.stage_busy_s[action] if fits and scenario.stage_busy_s else ()
        self.belief = self.belief.told(
            Ran(int(action), step_s, share if fits else None, not fits, scenario.pace_s if fits else (), busy_s)
        )
        reward = before - self.over - self.run_cost - (0.0 if fits else self.loss_cost)
        return self._observe(), reward, over, False, self._info()

    @property
    def over(self) -> float:
        """Log of the true step time of the quickest run over the least of all candidates."""
        done = [ran.candidate for ran in self.belief.ran if ran.step_s is not None]
        return LOST if not done else min(LOST, math.log(float(self.scenario.step_s[done].min()) / self.scenario.least_s))

    def action_masks(self) -> NDArray[np.bool_]:
        """Bool [K + 1]: what has not run yet, and to stop once something has."""
        mask = np.zeros(self.candidates + 1, dtype=bool)
        mask[: len(self.belief.pool.drafts)] = self.belief.left
        mask[-1] = self.belief.best is not None or not mask.any()
        return mask

    def render(self) -> str | None:
        """The runs so far, one a line."""
        if self.render_mode is None:
            return None
        lines = [
            f"candidate {ran.candidate}: " + ("out of memory" if ran.step_s is None else f"{1e3 * ran.step_s:.3f} ms")
            for ran in self.belief.ran
        ]
        return "\n".join([*lines, f"{100 * math.expm1(self.over):.1f} % over the best"])

    def _observe(self) -> dict[str, NDArray[Any]]:
        return observe(self.belief, self.runs, self.candidates)

    def _info(self) -> dict[str, Any]:
        return {
            "over": math.exp(self.over),
            "runs": len(self.belief.ran),
            "lost": sum(r.step_s is None for r in self.belief.ran),
        }
