"""``rlplace/Refinement-v0``: change a plan a move at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.backends import Evaluation, SimulatedBackend
from rlplace.envs.base import Common, Observation, PlacerEnv, check_moves, greedy_fit
from rlplace.envs.guide.features import FEATURES, NUM_FEATURES
from rlplace.envs.guide.guide import Guide, blind_view
from rlplace.envs.instance import FinalReward, Instance, infeasible_reward, log_ratio, score
from rlplace.errors import InputError
from rlplace.problem import Problem
from rlplace.simulator.records import check_devices

STARTS = ("best", "mixed", "greedy")
KEEPS = ("always", "better")

_PINNED = FEATURES.index("pinned_target")
_GUIDES = 32  # instances whose buffers are kept; with more, those that were not used for longest are made again


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
        problems: Sequence[Problem | Instance] | None = None,
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
        self.choosy = keep == "better"
        self._reward, self.plain = reward, reward is log_ratio
        self._make_spaces(moves, NUM_FEATURES)
        self._guide_of = lru_cache(_GUIDES)(lambda instance: Guide(instance, moves - 1, 0))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; options: ``problem`` (a number), ``plan`` (a device per group)."""
        super().reset(seed=seed)
        self._draw_instance(options)
        self._guide = self._guide_of(self.instance)
        self._unit_s = self.instance.ideal_s
        self._guide.state[0] = self.np_random.integers(1 << 64, dtype=np.uint64)
        self._plan, moves = self.starting_plan(self.instance, self.np_random, (options or {}).get("plan"))
        for _ in range(moves):
            self._read(*self._guide.simulator.evaluate(self._plan))
            self._offer()
            legal = np.flatnonzero(self._legal)
            choice = int(legal[self.np_random.integers(len(legal))])
            if choice > 0:
                self._plan = self._guide.moved(self._plan, choice - 1)
        self._left = self.max_moves
        self._best_result, simulated = self._evaluate()
        self._read(*simulated)
        self._best_plan = self._plan.copy()
        self._score = self._best_score = self._score_of(self._best_result)
        self._offer()
        self._done = False
        return self._observe(), {"problem": self._index}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Makes move `action`, or stops at 0."""
        choice = self._check_action(action)
        if choice == 0:
            return self._end(0.0)
        if not self._legal[choice]:
            overflow = max(0.0, float(self._table[choice, _PINNED]) - 1.0)
            return self._end(infeasible_reward(overflow), illegal=True)
        before, standing = self._plan, self._score
        self._plan = self._guide.moved(before, choice - 1)
        result, simulated = self._evaluate()
        self._score = self._score_of(result)
        gain = max(0.0, self._best_score - self._score)
        if gain > 0:
            if not self.plain:
                was = self._best_result
                pairs = (was.step_time_s, was.relative_overflow), (result.step_time_s, result.relative_overflow)
                gain = self.gain(self.instance, *pairs)
            self._best_score, self._best_plan, self._best_result = self._score, self._plan.copy(), result
        self._left -= 1
        kept = not self.choosy or self._score < standing
        if kept:
            self._read(*simulated)
        else:
            self._plan, self._score = before, standing
            self._table[choice], self._first[choice], self._legal[choice] = 0.0, -1, False
        if self._left == 0:
            return self._end(gain)
        if kept or not self._legal[1:].any():
            self._offer()
        return self._observe(), gain, False, False, {"problem": self._index}

    def move(self, action: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The groups that an offered move changes and the device each of them goes to, int32 [n] both; none for stop."""
        if not 1 <= action <= self._guide.count:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
        return self._guide.move(action - 1)

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
        gains = np.full(self.moves, -np.inf)
        gains[0] = 0.0
        which = np.flatnonzero(self._legal[1:])
        if type(self.backend) is SimulatedBackend:
            self.backend.calls += len(which)
            results = [Evaluation(*pair) for pair in zip(*self._guide.price(self._plan, which), strict=True)]
        else:
            results = [self.backend.evaluate(self.instance, self._guide.moved(self._plan, int(k))) for k in which]
        for k, result in zip(which, results, strict=True):
            gains[k + 1] = self._score - self._score_of(result)
        return gains

    def starting_plan(self, instance: Instance, random: np.random.Generator, devices: Any) -> tuple[NDArray[np.int32], int]:
        """A plan to start from, and how many random moves of it are made first.

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

    def gain(self, instance: Instance, was: tuple[float, float], now: tuple[float, float]) -> float:
        """What `reward` says of the step from one best plan to the next, each as step time and overflow."""
        before, after = (
            self._reward(step_s, instance.reference_step_time_s)
            if overflow == 0.0 and step_s < np.inf
            else infeasible_reward(overflow)
            for step_s, overflow in (was, now)
        )
        return after - before

    def _score_of(self, result: Evaluation) -> float:
        return score(result.step_time_s, result.relative_overflow, self.instance.reference_step_time_s)

    def _evaluate(self) -> tuple[Evaluation, tuple[float, float]]:
        """The result of the current plan by a call of the backend, and the simulator's step time and overflow."""
        simulated = self._guide.simulator.evaluate(self._plan)
        if type(self.backend) is SimulatedBackend:  # which would simulate the plan again
            self.backend.calls += 1
            return Evaluation(*simulated), simulated
        return self.backend.evaluate(self.instance, self._plan), simulated

    def _read(self, step_s: float, overflow: float) -> None:
        """Analyses the timeline of the current plan, which was simulated last; one that cannot complete has none."""
        if step_s == np.inf:
            blind_view(self._guide, self._plan)
        else:
            self._guide.read(self._plan, step_s, overflow)

    def _offer(self) -> None:
        """Draws moves of the plan that was looked at last."""
        guide = self._guide
        count = guide.draw(self._plan)
        self._clear()
        self._table[1 : count + 1] = guide.table[:count]
        self._first[1 : count + 1] = guide.groups[guide.ptr[:count]]
        filling = np.where(np.isfinite(guide.facts.limit), guide.view.pinned / guide.facts.limit, 0.0)
        self._legal[1 : count + 1] = guide.table[:count, _PINNED] <= np.float32(max(1.0, filling.max()))

    def _clear(self) -> None:
        self._table = np.zeros((self.moves, NUM_FEATURES), dtype=np.float32)
        self._first = np.full(self.moves, -1, dtype=np.int32)
        self._legal = np.zeros(self.moves, dtype=bool)
        self._legal[0] = True

    def _end(self, reward: float, *, illegal: bool = False) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._done = True
        self._clear()
        best = self._best_result
        info = self.closing_info(self._index, best.step_time_s, best.relative_overflow, self._best_plan)
        return self._observe(), reward, True, False, {**info, "illegal": illegal}

    def _observe(self) -> Observation:
        context = [
            self._left / self.max_moves,
            self._score,
            self._best_score,
            float(self._guide.view.load.max()) / self._unit_s,
        ]
        return self._assemble(self._plan, self._table, self._first, context)
