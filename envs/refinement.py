"""``rlplace/Refinement-v0``: change a plan a move at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.backends import Backend, Evaluation
from rlplace.envs.base import Observation, PlacerEnv, greedy_fit
from rlplace.envs.instance import Instance
from rlplace.envs.moves import Moves, draw_runs, propose
from rlplace.envs.observation import features, placed_state
from rlplace.envs.reward import infeasible_reward, score
from rlplace.errors import InputError
from rlplace.problem import Problem

STARTS = ("best", "mixed", "greedy")


class RefinementEnv(PlacerEnv):
    """Starts from a complete plan and moves groups; what counts is the best plan seen.

    ## Description
    Each step offers K - 1 moves and describes them by features: up to half from the planners' bottleneck analysis of the
    current timeline, the others drawn at random. A move puts one group, or a run of neighbouring groups, on another device.
    The agent picks one or stops.

    ## Action space
    ``Discrete(K)``: 0 stops, k applies move k. `action_masks` marks moves that exist and whose provable memory fits; 0 is
    always legal.

    ## Observation space
    | key | dtype, shape | meaning |
    |---|---|---|
    | graph | int32 (1,) | number of the problem in the bank |
    | device_of_group | int32 (max_groups,) | the current plan, -1 padding |
    | candidates | float32 (K * F,) | features of each move, row by row, zeros for stop, see `FEATURES` |
    | candidate_group | int32 (K,) | first group of each move, -1 for stop and for moves that do not exist |
    | context | float32 (8,) | devices, groups, memory pressure, steps left, score, best score, largest load |

    ## Rewards
    How much the step lowered the best score so far, where score = log(step time / best classical plan), plus 1 + relative
    overflow while the plan does not fit. The rewards of an episode add up to start score minus best score: a maximum over
    the visited plans, so trying a move that turns out badly costs nothing but the step. An illegal action ends the episode
    with -(1 + relative overflow).

    ## Starting state
    ``start="best"``: the best classical plan. ``"greedy"``: placed for memory alone. ``"mixed"``: the best plan, or half of
    the time that plan after a few random moves. ``options={"plan": device_of_group}`` gives any plan.

    ## Episode end
    Terminates at stop, after `max_moves` moves, or at an illegal action. Never truncates.

    The last info holds ``device_of_group``, int32 (max_groups,) with -1 as padding, and ``feasible``, ``step_time_s``,
    ``relative_overflow``.

    ## Arguments
    problems, backend, max_devices, max_groups, observation: as in Placement-v0. moves: K. max_moves: length of an episode.
    start: see above.

    ## Version history
    v0: first version.
    """

    def __init__(
        self,
        problems: Sequence[Problem | Instance] | None = None,
        *,
        backend: Backend | None = None,
        max_devices: int | None = None,
        max_groups: int | None = None,
        moves: int = 32,
        max_moves: int = 24,
        start: str = "best",
        observation: str = "indexed",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(problems, backend, max_devices, max_groups, observation, render_mode)
        if start not in STARTS:
            raise InputError(f"start must be one of {', '.join(STARTS)}, found {start!r}")
        if moves < 2 or max_moves < 1:
            raise InputError("moves must be at least 2 (one is stop) and max_moves at least 1")
        self._moves, self._max_moves, self._start = moves, max_moves, start
        self._make_spaces(moves)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; options: ``problem`` (a number), ``plan`` (a device per group)."""
        super().reset(seed=seed)
        self._draw_instance(options)
        self._plan = self._starting_plan((options or {}).get("plan"))
        self._left = self._max_moves
        self._result = self.backend.evaluate(self.instance, self._plan)
        self._best_plan, self._best_result = self._plan.copy(), self._result
        self._score = self._best_score = self._score_of(self._result)
        self._propose()
        return self._observe(), {"problem": self._index}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Applies move `action`, or stops at 0."""
        if self._done:
            raise RuntimeError("the episode is over; call reset()")
        choice = self._check_action(action)
        if choice == 0:
            return self._end(0.0)
        if not self._legal[choice]:
            overflow = self._overflow_of(choice)
            return self._end(infeasible_reward(overflow), illegal=True)
        self._plan = self._offered.apply(self._plan, choice)
        self._result = self.backend.evaluate(self.instance, self._plan)
        self._score = self._score_of(self._result)
        gain = max(0.0, self._best_score - self._score)
        if gain > 0:
            self._best_score, self._best_plan, self._best_result = self._score, self._plan.copy(), self._result
        self._left -= 1
        if self._left == 0:
            return self._end(gain)
        self._propose()
        return self._observe(), gain, False, False, {"problem": self._index}

    def action_masks(self) -> NDArray[np.bool_]:
        """Bool [K]; stop is always legal."""
        return self._legal.copy()

    def current_plan(self) -> NDArray[np.int32]:
        """int32 [G], the plan after the last move."""
        return self._plan

    def move_scores(self) -> NDArray[np.float64]:
        """float64 [K], how much each legal move would lower the score (stop: 0; others -inf).

        These are the labels of the warm start: every simulator call labels a move.
        """
        gains = np.full(self._moves, -np.inf)
        gains[0] = 0.0
        for k in np.flatnonzero(self._legal[1:]) + 1:
            plan = self._offered.apply(self._plan, int(k))
            gains[k] = self._score - self._score_of(self.backend.evaluate(self.instance, plan))
        return gains

    def _starting_plan(self, given: Any) -> NDArray[np.int32]:
        instance = self.instance
        if given is not None:
            plan = np.asarray(given, dtype=np.int32)
            if plan.shape != (instance.problem.num_groups,) or not ((plan >= 0) & (plan < instance.problem.num_devices)).all():
                raise InputError("options['plan'] must name an existing device for every group")
            if not instance.allowed[np.arange(len(plan)), plan].all():
                raise InputError("options['plan'] puts a group on a device where it may not sit")
            return plan.copy()
        if self._start == "greedy" or instance.floor is None:
            return greedy_fit(instance)
        plan = instance.floor.copy()
        if self._start == "mixed" and self.np_random.random() < 0.5:
            flat = np.ones(len(plan))
            for _ in range(int(self.np_random.integers(1, 9))):
                for groups, device in draw_runs(instance, plan, flat, self.np_random, 1):
                    plan[groups] = device
        return plan

    def _score_of(self, result: Evaluation) -> float:
        return score(result.step_time_s, result.relative_overflow, self.instance.reference_step_time_s)

    def _propose(self) -> None:
        instance = self.instance
        timeline = self.backend.timeline(instance, self._plan)
        self._state = placed_state(instance, timeline, self._plan)
        moves = propose(instance, timeline, self._plan, self._state.tightness, self.np_random, self._moves - 1)
        self._offered = Moves(  # with stop in front
            np.concatenate([[0], moves.ptr]),
            moves.groups,
            np.concatenate([[0], moves.device]).astype(np.int32),
            np.concatenate([[0.0], moves.saving_s]),
        )
        self._candidates = features(instance, self._state, self._offered)
        self._legal = self._offered.exists
        fits = self._candidates[:, 8] <= 1.0
        self._legal &= fits
        self._legal[0] = True

    def _overflow_of(self, choice: int) -> float:
        return max(0.0, float(self._candidates[choice, 8]) - 1.0)

    def _end(self, reward: float, *, illegal: bool = False) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._done = True
        best = self._best_result
        info: dict[str, Any] = {
            "problem": self._index,
            "feasible": best.feasible,
            "illegal": illegal,
            "step_time_s": best.step_time_s,
            "relative_overflow": best.relative_overflow,
            "device_of_group": self._padded(self._best_plan),
        }
        if best.feasible:
            info["vs_best_baseline"] = best.step_time_s / self.instance.reference_step_time_s
        return self._observe(), reward, True, False, info

    def _observe(self) -> Observation:
        context = [
            self._left / self._max_moves,
            self._score,
            self._best_score,
            float(self._state.load_s.max()) / self.instance.ideal_s,
        ]
        return self._assemble(self._plan, self._candidates, self._offered.first_group, context)
