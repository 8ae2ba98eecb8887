"""``rlplace/Refinement-v0``: change a plan a move at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from rlplace.envs import refinement_kernel as r
from rlplace.envs.base import Common, Infos, PlacerEnv, Rows, check_moves, greedy_fit
from rlplace.envs.guide.features import FEATURES, NUM_FEATURES
from rlplace.envs.instance import FinalReward, PlacementInstance, infeasible_reward, log_ratio, score
from rlplace.errors import InputError
from rlplace.problem import Problem
from rlplace.simulator.records import check_devices

STARTS = ("best", "mixed", "greedy")
KEEPS = ("always", "better")


class RefinementEnv(PlacerEnv):
    """Starts from a complete plan and moves groups; what counts is the best plan seen.

    ## Description
    Each step draws K - 1 moves where the timeline of the current plan says that time is lost (`rlplace.envs.guide.draw`) and
    describes them by what a list scheduler would look at (`rlplace.envs.guide.features`). A move puts one group, a run of
    consecutive groups or a connected cluster on another device, swaps two groups, or empties or exchanges whole devices.
    The agent picks one or stops. With ``keep="better"`` a move after which the score is no lower is taken back and not offered
    again, as the agent's search does it: only the moves that are kept need a new look at the timeline, so that most steps cost
    one simulation and nothing else. Moves are drawn anew after a move that is kept, and when none is left.

    ## Action space
    ``Discrete(K)``: 0 stops, k makes move k. `action_masks` marks moves that exist and after which the provable memory of
    the devices concerned fits (or, where the current plan does not fit either, is no worse than now); 0 is always legal.

    ## Observation space
    | key | dtype, shape | meaning |
    |---|---|---|
    | graph | int32 (1,) | number of the problem in the bank |
    | device_of_group | int32 (max_groups,) | the current plan, -1 padding |
    | candidates | float32 (K * F,) | features of each move, row by row, zeros for stop and for moves that do not exist |
    | candidate_group | int32 (K,) | first group of each move, -1 for stop and for moves that do not exist |
    | context | float32 (8,) | devices, groups, memory pressure, steps left, score, best score, largest load |

    ## Rewards
    How much the step lowered the best score so far, where score = log(step time / best classical plan), or 5 +
    log(1 + relative overflow) while the plan does not fit. The rewards of an episode add up to start score minus best score:
    a maximum over the visited plans, so trying a move that turns out badly costs nothing but the step. An illegal action
    ends the episode with -(5 + log(1 + relative overflow)).

    ## Starting state
    ``start="best"``: the best classical plan. ``"greedy"``: placed for memory alone. ``"mixed"``: the best plan, or half of
    the time that plan after a few random moves. ``options={"plan": device_of_group}`` gives any plan.

    ## Episode end
    Terminates at stop, after `max_moves` moves (those that were taken back, too), or at an illegal action. Never truncates.

    The last info is as in Placement-v0, of the best plan.

    ## Arguments
    problems, backend, max_devices, max_groups, observation: as in Placement-v0. moves: K. max_moves: length of an episode.
    start, keep: see above. reward: called as in Placement-v0 with the best plan's step time; a step that finds a better plan is
    rewarded by how much that rises.

    ## Version history
    v0: first version.
    """

    FEATURES: ClassVar[tuple[str, ...]] = FEATURES
    """Names of the columns of `candidates`; `rlplace.envs.guide.features` says what they mean."""

    def __init__(
        self,
        problems: Sequence[Problem | PlacementInstance] | None = None,
        *,
        moves: int = 32,
        max_moves: int = 24,
        start: str = "best",
        keep: str = "always",
        reward: FinalReward = log_ratio,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(problems, **common)
        check_moves(start, STARTS, moves, max_moves)
        if keep not in KEEPS:
            raise InputError(f"keep must be one of {', '.join(KEEPS)}, found {keep!r}")
        self.moves, self.max_moves, self._start = moves, max_moves, start
        self._choosy = keep == "better"
        self._reward, self._plain = reward, reward is log_ratio
        self._make_spaces(moves, NUM_FEATURES)

    @cached_property
    def state(self) -> r.RefinementState:  # type: ignore[override]
        """The episodes."""
        return r.refinement_state(self.count, self.moves, self.max_groups)

    @cached_property
    def _bank(self) -> tuple[Any, ...]:
        return tuple(r.refinement_bank(self.instances))

    @cached_property
    def _scratch(self) -> list[tuple[Any, ...]]:
        return [tuple(r.scratch_for(self.instances, self.moves)) for _ in range(self.threads)]

    def move(self, action: int, e: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the groups that an offered move of an environment changes and the device each of them goes to, int32 [n]
        both; none for stop.
        """
        state, part = self.state, slice(0)
        if 0 < action < self.moves and state.group[e, action] >= 0:
            part = slice(state.ptr[e, action - 1], state.ptr[e, action])
        return state.groups[e, part].copy(), state.targets[e, part].copy()

    def moved(self, action: int, e: int = 0) -> NDArray[np.int32]:
        """Returns int32 [G], the plan of an environment after an offered move."""
        plan: NDArray[np.int32] = self.state.plan[e, : self.instances[self.index[e]].problem.num_groups].copy()
        groups, devices = self.move(action, e)
        plan[groups] = devices
        return plan

    def begin(self, rows: Rows, random: Sequence[np.random.Generator], options: Mapping[str, Any]) -> None:
        """Begins episodes, see `PlacerEnv.begin`."""
        state = self.state
        still = np.zeros(self.count, dtype=np.int64)
        for e in rows.tolist():
            instance = self.instances[self.index[e]]
            state.instance[e] = self.index[e]
            state.random[e] = random[e].integers(1 << 64, dtype=np.uint64)
            groups, row = instance.problem.num_groups, np.array([e])
            state.plan[e, groups:] = state.best_plan[e, groups:] = -1
            state.plan[e, :groups], moves = self.starting_plan(instance, random[e], options.get("plan"))
            for _ in range(moves):
                self._run(row, still, r.LOOK)
                legal = np.flatnonzero(state.legal[e])
                state.plan[e, :groups] = self.moved(int(legal[random[e].integers(len(legal))]), e)
            if not self.simulates:
                self._measure(e, state.plan[e, :groups])
        if self.simulates:
            self.backend.calls += len(rows)
        state.left[rows] = self.max_moves
        self._run(rows, still, r.BEGIN)

    def advance(self, rows: Rows, actions: NDArray[np.int64], rewards: NDArray[np.float64]) -> dict[int, Infos]:
        """Steps environments, see `PlacerEnv.advance`."""
        state = self.state
        before = state.best_s.copy(), state.best_overflow.copy()
        makes = rows[(actions[rows] > 0) & state.legal[rows, actions[rows]]]
        if self.simulates:
            self.backend.calls += len(makes)
        else:
            for e in makes.tolist():
                self._measure(e, self.moved(int(actions[e]), e))
        self._run(rows, actions, r.STEP)
        rewards[rows] = state.reward[rows]
        if not self._plain:
            for e in rows[(state.status[rows] != r.ILLEGAL) & (state.reward[rows] > 0)].tolist():
                was, now = (before[0][e], before[1][e]), (state.best_s[e], state.best_overflow[e])
                rewards[e] = self.gain(self.instances[self.index[e]], was, now)
        closing = {}
        for e in rows[state.status[rows] != r.RUNNING].tolist():
            plan = state.best_plan[e, : self.instances[self.index[e]].problem.num_groups]
            info = self.closing_info(int(self.index[e]), state.best_s[e], state.best_overflow[e], plan)
            closing[e] = {**info, "illegal": bool(state.status[e] == r.ILLEGAL)}
        return closing

    def _run(self, rows: Rows, actions: NDArray[np.int64], mode: int) -> None:
        bank, scratch, state, most, choosy = self._bank, self._scratch, tuple(self.state), self.max_moves, self._choosy
        self._spread(lambda part, n: r.refine(bank, scratch[n], state, part, actions, most, mode, choosy), rows)

    def _measure(self, e: int, plan: NDArray[np.int32]) -> None:
        """Evaluates the plan of an environment by a backend other than the simulator."""
        found = self.backend.evaluate(self.instances[self.index[e]], plan)
        self.state.measured[e] = found.step_time_s, found.relative_overflow

    def move_scores(self) -> NDArray[np.float64]:
        """Returns float64 [K], how much each legal move would lower the score (stop: 0; others -inf).

        These are the labels of the warm start: every simulator call labels a move.
        """
        gains = np.full(self.moves, -np.inf)
        gains[0] = 0.0
        which = np.flatnonzero(self.action_masks()[1:]) + 1
        plans = [self.moved(int(action)) for action in which]
        results = [self.backend.evaluate(self.instance, plan) for plan in plans]
        score_now = float(self.state.score[0])
        for action, found in zip(which, results, strict=True):
            gains[action] = score_now - score(found.step_time_s, found.relative_overflow, self.instance.reference_step_time_s)
        return gains

    def starting_plan(
        self, instance: PlacementInstance, random: np.random.Generator, devices: Any
    ) -> tuple[NDArray[np.int32], int]:
        """Returns a plan to start from, and how many random moves of it are made first.

        Args:
            instance: The instance.
            random: Draws where ``start="mixed"``.
            devices: A device per group, or None.

        Raises:
            InputError: `devices` is no plan of the instance.
        """
        if devices is not None:
            try:
                plan = check_devices(devices, (instance.problem.num_groups,), instance.problem)
            except InputError as error:
                raise InputError(f"options['plan'] must name a device for every group: {error}") from None
            if not instance.allowed[np.arange(len(plan)), plan].all():
                raise InputError("options['plan'] puts a group on a device where it may not sit")
            return plan, 0
        if self._start == "greedy" or instance.floor is None:
            return greedy_fit(instance), 0
        moves = int(random.integers(1, 9)) if self._start == "mixed" and random.random() < 0.5 else 0
        return instance.floor.copy(), moves

    def gain(self, instance: PlacementInstance, was: tuple[float, float], now: tuple[float, float]) -> float:
        """Returns the difference of `reward` for the step from one best plan to the next, each as step time and overflow."""
        before, after = (
            self._reward(step_s, instance.reference_step_time_s)
            if overflow == 0.0 and step_s < np.inf
            else infeasible_reward(overflow)
            for step_s, overflow in (was, now)
        )
        return after - before
