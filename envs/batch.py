"""The episodes of N environments on problems of a list, stepped by one compiled call.

A single environment is a batch of one and holds the rules: instances, rewards, starting plans. Vector environments are batches
of N (`rlplace.envs.vector`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.envs import construction as c
from rlplace.envs import refinement_kernel as r
from rlplace.envs.instance import infeasible_reward

if TYPE_CHECKING:
    from rlplace.envs.base import Observation, PlacerEnv
    from rlplace.envs.placement import PlacementEnv
    from rlplace.envs.refinement import RefinementEnv

Infos = dict[str, Any]
Rows = NDArray[np.int64]
Starts = Sequence[np.random.Generator]

APART = 64
"""Environments from which several threads step them; fewer are stepped sooner by one."""


class Batch:
    """Episodes of N environments.

    Attributes:
        rules: The single environment whose rules they follow.
        index: int64 [N], number of each episode's problem.
        plan: int32 [N, max_groups], each environment's plan, -1 not placed or padding.
        legal: bool [N, actions].
    """

    plan: NDArray[np.int32]
    legal: NDArray[np.bool_]

    def __init__(self, rules: PlacerEnv, count: int, threads: int) -> None:
        """Allocates the state of `count` environments, stepped by `threads` threads."""
        self.rules, self.index = rules, np.zeros(count, dtype=np.int64)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def begin(self, rows: Rows, random: Starts, options: Mapping[str, Any]) -> None:
        """Begins the episodes of some environments, whose `index` is set.

        Args:
            rows: int64 [n].
            random: Random numbers of every environment.
            options: Options of `reset`.
        """
        raise NotImplementedError

    def advance(self, rows: Rows, actions: NDArray[np.int64], rewards: NDArray[np.float64]) -> dict[int, Infos]:
        """Steps environments and fills their rewards.

        Args:
            rows: int64 [n].
            actions: int64 [N].
            rewards: float64 [N], changed.

        Returns:
            The last infos of the episodes that end, by environment.
        """
        raise NotImplementedError

    def observe(self) -> Observation:
        """Returns the observations of all environments, each array with a first dimension of N."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _observed(self, **changing: NDArray[Any]) -> Observation:
        """Returns an observation from copies of what changes, with the constant parts."""
        seen: Observation = {"graph": self.index.astype(np.int32)[:, None], "device_of_group": self.plan.copy()}
        if (full := self.rules.full) is not None:
            seen |= {key: np.stack([full[i][key] for i in self.index.tolist()]) for key in full[0]}
        return seen | {name: values.copy() for name, values in changing.items()}

    def _spread(self, call: Callable[[Rows, int], object], rows: Rows) -> None:
        """Calls ``call(rows, thread)`` for parts of the rows, which run at the same time."""
        if self._pool is None or len(rows) < APART:
            call(rows, 0)
            return
        parts = np.array_split(rows, self._threads)
        others = [self._pool.submit(call, part, number + 1) for number, part in enumerate(parts[1:])]
        call(parts[0], 0)
        for other in others:
            other.result()


class PlacementBatch(Batch):
    """Episodes of `rlplace.envs.PlacementEnv`: a group of each is placed and the next one described in one compiled call."""

    rules: PlacementEnv

    def __init__(self, rules: PlacementEnv, count: int, threads: int = 1) -> None:
        """Allocates the state of `count` environments, stepped by `threads` threads."""
        super().__init__(rules, count, threads)
        self._bank = tuple(c.construction_bank(rules.instances))
        self.state = c.construction_state(count, rules.max_groups, rules.max_devices)
        self.plan, self.legal = self.state.plan, self.state.legal

    def _run(self, rows: Rows, actions: NDArray[np.int64], begin: bool) -> None:
        state = tuple(self.state)
        self._spread(lambda part, _: c.construct(self._bank, state, part, actions, begin), rows)

    def begin(self, rows: Rows, random: Starts, options: Mapping[str, Any]) -> None:
        """Begins episodes, see `Batch.begin`."""
        self.state.instance[rows] = self.index[rows]
        self._run(rows, self.state.instance, True)

    def advance(self, rows: Rows, actions: NDArray[np.int64], rewards: NDArray[np.float64]) -> dict[int, Infos]:
        """Steps environments, see `Batch.advance`."""
        state = self.state
        self._run(rows, actions, False)
        closing: dict[int, Infos] = {}
        for e in rows[state.status[rows] != c.RUNNING].tolist():
            number = int(self.index[e])
            if state.status[e] == c.ILLEGAL:
                overflow = float(state.overflow[e])
                rewards[e] = infeasible_reward(overflow)
                closing[e] = {"problem": number, "feasible": False, "illegal": True, "relative_overflow": overflow}
                continue
            plan = self.plan[e, : self.rules.instances[number].problem.num_groups]
            plan[:], rewards[e], closing[e] = self.rules.finish(number, plan, stuck=bool(state.status[e] == c.STUCK))
        return closing

    def observe(self) -> Observation:
        """Returns observations, see `Batch.observe`."""
        state = self.state
        return self._observed(candidates=state.table, candidate_group=state.group, context=state.context)


class RefinementBatch(Batch):
    """Episodes of `rlplace.envs.RefinementEnv`: simulated, analysed and described in one compiled call."""

    rules: RefinementEnv

    def __init__(self, rules: RefinementEnv, count: int, threads: int = 1) -> None:
        """Allocates the state of `count` environments, stepped by `threads` threads."""
        super().__init__(rules, count, threads)
        self._bank = tuple(r.refinement_bank(rules.instances))
        self._scratch = [tuple(r.scratch_for(rules.instances, rules.moves)) for _ in range(threads)]
        self.state = r.refinement_state(count, rules.moves, rules.max_groups)
        self.plan, self.legal = self.state.plan, self.state.legal
        self._still = np.zeros(count, dtype=np.int64)

    def move(self, e: int, action: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the groups that an offered move of an environment changes, and their devices; int32 [n] both, none
        for stop.
        """
        state = self.state
        part = slice(state.ptr[e, action - 1], state.ptr[e, action]) if action and state.first[e, action] >= 0 else slice(0)
        return state.groups[e, part], state.targets[e, part]

    def moved(self, e: int, action: int) -> NDArray[np.int32]:
        """Returns int32 [G], the plan of an environment after an offered move."""
        plan = self.plan[e, : self.rules.instances[self.index[e]].problem.num_groups].copy()
        groups, devices = self.move(e, action)
        plan[groups] = devices
        return plan

    def begin(self, rows: Rows, random: Starts, options: Mapping[str, Any]) -> None:
        """Begins episodes, see `Batch.begin`."""
        state, rules = self.state, self.rules
        for e in rows.tolist():
            instance = rules.instances[self.index[e]]
            state.instance[e] = self.index[e]
            state.random[e] = random[e].integers(1 << 64, dtype=np.uint64)
            groups, row = instance.problem.num_groups, np.array([e])
            state.plan[e, groups:] = state.best_plan[e, groups:] = -1
            state.plan[e, :groups], moves = rules.starting_plan(instance, random[e], options.get("plan"))
            for _ in range(moves):
                self._run(row, self._still, r.LOOK)
                legal = np.flatnonzero(state.legal[e])
                state.plan[e, :groups] = self.moved(e, int(legal[random[e].integers(len(legal))]))
            if not rules.simulates:
                self._measure(e, state.plan[e, :groups])
        if rules.simulates:
            rules.backend.calls += len(rows)
        state.left[rows] = rules.max_moves
        self._run(rows, self._still, r.BEGIN)

    def advance(self, rows: Rows, actions: NDArray[np.int64], rewards: NDArray[np.float64]) -> dict[int, Infos]:
        """Steps environments, see `Batch.advance`."""
        state, rules = self.state, self.rules
        before = state.best_s.copy(), state.best_overflow.copy()
        makes = rows[(actions[rows] > 0) & state.legal[rows, actions[rows]]]
        if rules.simulates:
            rules.backend.calls += len(makes)
        else:
            for e in makes.tolist():
                self._measure(e, self.moved(e, int(actions[e])))
        self._run(rows, actions, r.STEP)
        rewards[rows] = state.reward[rows]
        if not rules.plain:
            for e in rows[(state.status[rows] != r.ILLEGAL) & (state.reward[rows] > 0)].tolist():
                was, now = (before[0][e], before[1][e]), (state.best_s[e], state.best_overflow[e])
                rewards[e] = rules.gain(rules.instances[self.index[e]], was, now)
        closing = {}
        for e in rows[state.status[rows] != r.RUNNING].tolist():
            plan = state.best_plan[e, : rules.instances[self.index[e]].problem.num_groups]
            info = rules.closing_info(int(self.index[e]), state.best_s[e], state.best_overflow[e], plan)
            closing[e] = {**info, "illegal": bool(state.status[e] == r.ILLEGAL)}
        return closing

    def observe(self) -> Observation:
        """Returns observations, see `Batch.observe`."""
        state = self.state
        return self._observed(candidates=state.table, candidate_group=state.first, context=state.context)

    def _run(self, rows: Rows, actions: NDArray[np.int64], mode: int) -> None:
        state, most = tuple(self.state), self.rules.max_moves

        def call(part: Rows, thread: int) -> None:
            r.refine(self._bank, self._scratch[thread], state, part, actions, most, mode, self.rules.choosy)

        self._spread(call, rows)

    def _measure(self, e: int, plan: NDArray[np.int32]) -> None:
        """Evaluates the plan of an environment by a backend other than the simulator."""
        found = self.rules.backend.evaluate(self.rules.instances[self.index[e]], plan)
        self.state.measured[e] = found.step_time_s, found.relative_overflow
