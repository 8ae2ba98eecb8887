"""``rlplace/Refinement-v0`` as a vector environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.base import Observation
from rlplace.envs.guide.draw import SHARES
from rlplace.envs.refinement import RefinementEnv
from rlplace.envs.vector.base import Infos, PlacerVectorEnv
from rlplace.envs.vector.refine import BEGIN, ILLEGAL, LOOK, RUNNING, STEP, known_of, refine, room_for, state_for


class RefinementVectorEnv(PlacerVectorEnv):
    """N times `rlplace.envs.RefinementEnv`: simulated, analysed and described in one compiled call."""

    kind = RefinementEnv
    single: RefinementEnv

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        """See the base; options are also those of `RefinementEnv`."""
        super().__init__(num_envs, **options)
        single = self.single
        self._known = tuple(known_of(single.instances))
        self._rooms = [tuple(room_for(single.instances, single.moves)) for _ in range(self._threads)]
        self._state = state_for(num_envs, single.moves, single.max_groups)
        self._still = np.zeros(num_envs, dtype=np.int64)

    def action_masks(self) -> NDArray[np.bool_]:
        """Bool [N, K]; stop is always legal."""
        return self._state.legal.copy()

    def _run(self, rows: NDArray[np.int64], actions: NDArray[np.int64], mode: int) -> None:
        state, most = tuple(self._state), self.single.max_moves

        def call(part: NDArray[np.int64], thread: int) -> None:
            refine(self._known, self._rooms[thread], state, part, actions, most, mode, self.single.choosy, SHARES)

        self._spread(call, rows)

    def _begin(self, rows: NDArray[np.int64], options: dict[str, Any]) -> None:
        state, single = self._state, self.single
        for e in rows.tolist():
            instance, random = self.instances[self._index[e]], self._random[e][0]
            state.instance[e] = self._index[e]
            state.random[e] = random.integers(1 << 64, dtype=np.uint64)
            groups, row = instance.problem.num_groups, np.array([e])
            state.plan[e, groups:] = state.best_plan[e, groups:] = -1
            plan, moves = single.starting_plan(instance, random, options.get("plan"))
            state.plan[e, :groups] = plan
            for _ in range(moves):
                self._run(row, self._still, LOOK)
                legal = np.flatnonzero(state.legal[e])
                choice = int(legal[random.integers(len(legal))])
                moved = slice(state.ptr[e, choice - 1], state.ptr[e, choice]) if choice else slice(0)
                state.plan[e, state.groups[e, moved]] = state.targets[e, moved]
        state.left[rows] = single.max_moves
        self._run(rows, self._still, BEGIN)

    def _advance(self, rows: NDArray[np.int64], actions: NDArray[np.int64], rewards: NDArray[np.float64]) -> dict[int, Infos]:
        state = self._state
        before = state.best_s.copy(), state.best_overflow.copy()
        self._run(rows, actions, STEP)
        rewards[rows] = state.reward[rows]
        if not self.single.plain:
            for e in rows[(state.reward[rows] > 0)].tolist():
                was, now = (before[0][e], before[1][e]), (state.best_s[e], state.best_overflow[e])
                rewards[e] = self.single.gain(self.instances[self._index[e]], was, now)
        closing = {}
        for e in rows[state.status[rows] != RUNNING].tolist():
            instance = self.instances[self._index[e]]
            plan = state.best_plan[e, : instance.problem.num_groups]
            info = self.single.closing_info(int(self._index[e]), state.best_s[e], state.best_overflow[e], plan)
            closing[e] = {**info, "illegal": bool(state.status[e] == ILLEGAL)}
        return closing

    def _observe(self) -> Observation:
        state = self._state
        return {
            **self._graph(), "device_of_group": state.plan.copy(), "candidates": state.table.copy(),
            "candidate_group": state.first.copy(), "context": state.context.copy(),
        }  # fmt: skip
