"""``rlplace/Cluster-v0``: which strategy to run next on a cluster whose truth is hidden.

An episode is a model on a cluster. The planner has proposed candidates; the cost model says what they take, and is wrong by
something that is drawn anew in each episode (`rlplace.measure.truths`), or was measured (`Scenario.replayed`). An action runs
a candidate, which shows its step time and memory or that it does not fit, or stops. The observation is the belief after all
runs (`rlplace.measure.belief`), as a graph: a node for each candidate (what it is expected to take, how sure that is, whether
it will fit, what it took), the correlation of any two, and the stages of each one's plan with the places that hold them. K
candidates and one action to stop, S stages at most. Step times are linear around the cost model, where a session of real runs
follows its belief.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.envs.cluster_view import FEATURES, STAGE_FEATURES, observe, plan_graphs
from rlplace.envs.guide.features import CLIP
from rlplace.envs.instance import FinalReward, log_ratio
from rlplace.envs.observation import NUM_CONTEXT
from rlplace.envs.scenario import Scenario, default_scenarios
from rlplace.errors import InputError
from rlplace.measure.belief import Belief, Ran
from rlplace.measure.choose import LOST
from rlplace.measure.truths import NOISE


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
        self._graphs: dict[int, dict[str, NDArray[Any]]] = {}  # by pool
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
        self.belief = self.belief.told(
            Ran(int(action), step_s, share if fits else None, not fits, scenario.pace_s if fits else (), busy_s)
        )
        reward = self._worth() - before - self.run_cost - (0.0 if fits else self.loss_cost)
        return self._observe(), reward, over, False, self._info()

    @property
    def over(self) -> float:
        """Log of the true step time of the quickest run over the least of all candidates."""
        done = [ran.candidate for ran in self.belief.ran if ran.step_s is not None]
        return LOST if not done else min(LOST, math.log(float(self.scenario.step_s[done].min()) / self.scenario.least_s))

    def _worth(self) -> float:
        """What `reward` says of the quickest run."""
        done = [ran.candidate for ran in self.belief.ran if ran.step_s is not None]
        return max(-LOST, self._reward(float(self.scenario.step_s[done].min()), self.scenario.least_s)) if done else -LOST

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
        pool = self.scenario.pool
        if id(pool) not in self._graphs:
            self._graphs[id(pool)] = plan_graphs(pool, self.candidates, self.stages)
        graphs = {name: value.copy() for name, value in self._graphs[id(pool)].items()}
        return {**observe(self.belief, self.runs, self.candidates), **graphs}

    def _info(self) -> dict[str, Any]:
        return {
            "over": math.exp(self.over),
            "runs": len(self.belief.ran),
            "lost": sum(r.step_s is None for r in self.belief.ran),
        }
