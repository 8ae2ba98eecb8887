"""``rlplace/Strategy-v0``: change the strategy of a training step a move at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.envs.base import NumberedEnv, Observation, check_moves
from rlplace.envs.cluster import default_questions
from rlplace.envs.guide.features import CLIP
from rlplace.envs.instance import FinalReward, infeasible_reward, log_ratio
from rlplace.envs.observation import NUM_CONTEXT
from rlplace.envs.strategy_board import FEATURES, KINDS, STAGE_FEATURES, STARTS, board_of
from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy
from rlplace.strategy.search.tries import SearchProblem, Tried


class StrategyEnv(NumberedEnv):
    """Starts from a whole strategy that fits and changes it; what counts is the best strategy seen.

    ## Description
    A strategy says which stages the blocks of a model form, on which devices, with which degrees, sharding level,
    recomputation, micro-batches, schedule and offload. Each step offers up to K - 1 moves of the planner's local search
    (`rlplace.strategy.search.moves`), kinds taking turns: schedule, blocks over a cut, micro-batches, degrees and levels,
    devices
    (places merged, split, exchanged, left out), and what a block recomputes or offloads. After a move of another kind blocks
    recompute and offload anew, as little as fits. The block executor evaluates what is offered; the agent picks or stops.

    ## Action space
    ``Discrete(K)``: 0 stops, k makes move k. `action_masks` marks moves whose strategy has room on every device by the exact
    account of memory and is refused by neither the question's space nor its `why_not`; 0 is always legal.

    ## Observation space
    | key | dtype, shape | meaning |
    |---|---|---|
    | stages | float32 (S * F,) | stages of the strategy by `STAGE_FEATURES`, row by row, zeros as padding |
    | place | int32 (S,) | number of the mesh that holds each stage, -1 padding |
    | candidates | float32 (K * F,) | legal moves by `FEATURES`, row by row; zeros for stop and all others |
    | candidate_group | int32 (K,) | number of each legal move's kind, -1 for stop and all others |
    | context | float32 (8,) | devices, blocks, samples, moves left, score, best score, share of legal moves, 0 |

    ## Rewards
    How much the step lowered the best score so far, where score = log(step time / that of the classical search's best): the
    rewards of an episode add up to start score minus best score. An illegal action ends the episode with -5.

    ## Starting state
    ``start="uniform"``: the best uniform strategy that the classical search finds. ``"floor"``: its best of one pipeline.
    ``"random"``: a random uniform one that fits. ``options={"strategy": {...}}`` gives any that fits.

    ## Episode end
    Terminates at stop, after `max_moves` moves, or at an illegal action. Never truncates. Every info has ``problem``,
    ``illegal``, ``step_time_s``, ``vs_best_baseline`` (over the classical search's) and, by device (D,), ``compute_s``,
    ``transfer_s`` (communication that is waited for), ``idle_s`` and ``peak_memory_bytes``. The last is of the best strategy,
    and has it as ``strategy``, a dict as in plan files.

    ## Arguments
    problems: questions (`rlplace.strategy.search.plan.ask`); default: three small ones. moves: K. max_moves: length of an
        episode.
    start: see above. calls: evaluations of the classical search, once for each question. reward: called with a step time and
    the classical search's, as in Placement-v0; a step that finds a better strategy is rewarded by how much that rises.

    ## Version history
    v0: first version.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    FEATURES, STAGE_FEATURES = FEATURES, STAGE_FEATURES

    def __init__(
        self,
        problems: Sequence[SearchProblem] | SearchProblem | None = None,
        *,
        moves: int = 16,
        max_moves: int = 24,
        start: str = "uniform",
        calls: int = 200,
        reward: FinalReward = log_ratio,
    ) -> None:
        chosen = (
            default_questions() if problems is None else [problems] if isinstance(problems, SearchProblem) else list(problems)
        )
        if not chosen or not all(isinstance(one, SearchProblem) for one in chosen):
            raise InputError("Strategy-v0 needs questions of whole strategies; rlplace.strategy.search.plan.ask makes one")
        check_moves(start, STARTS, moves, max_moves)
        self.boards = [board_of(question, calls) for question in chosen]
        self.moves, self.max_moves = moves, max_moves
        self.num_problems, self._start, self._reward, self._done = len(chosen), start, reward, True
        self.max_stages = max(len(question.costs.names) for question in chosen)
        self.max_devices = max(question.cluster.num_devices for question in chosen)
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {
                "stages": spaces.Box(-CLIP, CLIP, (self.max_stages * len(STAGE_FEATURES),), np.float32),
                "place": spaces.Box(-1, self.max_stages, (self.max_stages,), np.int32),
                "candidates": spaces.Box(-CLIP, CLIP, (moves * len(FEATURES),), np.float32),
                "candidate_group": spaces.Box(-1, len(KINDS), (moves,), np.int32),
                "context": spaces.Box(-CLIP, CLIP, (NUM_CONTEXT,), np.float32),
            }
        )
        self.action_space = spaces.Discrete(moves)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; options: ``problem`` (a number), ``strategy`` (a dict as in plan files)."""
        super().reset(seed=seed)
        self._done = True
        self._index = self.draw_index(self.np_random, options)
        self.board, self._left, named = self.boards[self._index], self.max_moves, (options or {}).get("strategy")
        self.question, self._floor_s = self.board.question, self.board.floor.step_s
        given = None if named is None else self.board.given(Strategy.from_dict(named, "options['strategy']"))
        self.now = given or self.board.first(self._start, self.np_random)
        self._best = self.now
        self.offered = self.board.moves(self.now.draft, self.moves - 1, self.np_random)
        self._done = False
        return self._observe(), self._info(self.now)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Makes move `action`, or stops at 0."""
        choice = self._check_action(action)
        if choice == 0:
            return self._end(0.0)
        after = self.offered[choice - 1][2] if choice <= len(self.offered) else None
        if after is None:
            return self._end(infeasible_reward(0.0), illegal=True)
        self.now, gain = after, 0.0
        if after.step_s < self._best.step_s:
            gain = self._reward(after.step_s, self._floor_s) - self._reward(self._best.step_s, self._floor_s)
            self._best = after
        self._left -= 1
        if self._left == 0:
            return self._end(gain)
        self.offered = self.board.moves(self.now.draft, self.moves - 1, self.np_random)
        return self._observe(), gain, False, False, self._info(self.now)

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns bool [K]; stop is always legal."""
        return self.move_scores() > -np.inf

    def move_scores(self) -> NDArray[np.float64]:
        """Returns float64 [K], how much each legal move would lower the score (stop: 0; others -inf)."""
        lowers = np.full(self.moves, -np.inf)
        lowers[0] = 0.0
        for action, (*_, after) in enumerate(self.offered, 1):
            if after is not None:
                lowers[action] = math.log(self.now.step_s / after.step_s)
        return lowers

    def current_strategy(self) -> Strategy:
        """Returns the strategy after the last move."""
        return self.now.draft.strategy(self.question.costs.names)

    def _end(self, reward: float, *, illegal: bool = False) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._done, self.offered = True, []
        strategy = self._best.draft.strategy(self.question.costs.names).to_dict()
        return self._observe(), reward, True, False, {**self._info(self._best), "illegal": illegal, "strategy": strategy}

    def _info(self, tried: Tried) -> dict[str, Any]:
        step_s, devices = tried.step_s, self.board.devices(tried.draft, self.max_devices)
        told = {"problem": self._index, "illegal": False, "step_time_s": step_s, "vs_best_baseline": step_s / self._floor_s}
        return {**told, **devices}

    def _observe(self) -> Observation:
        question, draft, lowers, now = self.question, self.now.draft, self.move_scores(), self.board.choices(self.now.draft)
        table = np.zeros((self.moves, len(FEATURES)), dtype=np.float32)
        group = np.full(self.moves, -1, dtype=np.int32)
        for action, (kind, _, after) in enumerate(self.offered, 1):
            if after is not None:
                group[action] = number = KINDS.index(kind)
                table[action, number], table[action, len(KINDS)] = 1.0, lowers[action]
                table[action, len(KINDS) + 1 :] = self.board.choices(after.draft) - now
        scores = (math.log(tried.step_s / self._floor_s) for tried in (self.now, self._best))
        context = [
            question.cluster.num_devices / 8.0, math.log2(len(question.costs.names) + 1) / 8.0, math.log2(question.batch) / 8.0,
            self._left / self.max_moves, *scores, (group >= 0).mean(), 0.0,
        ]  # fmt: skip
        return {
            **self.board.stages(draft, self.max_stages),
            "candidates": table.clip(-CLIP, CLIP).ravel(),
            "candidate_group": group,
            "context": np.array(context, dtype=np.float32).clip(-CLIP, CLIP),
        }
