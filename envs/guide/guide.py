"""`Guide`: simulates and analyses plans of one instance, draws moves, computes their features and prices them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.guide.analysis import analyse
from rlplace.envs.guide.draw import draw_moves
from rlplace.envs.guide.features import NUM_FEATURES, move_features
from rlplace.envs.guide.records import MoveSet, SimulatedStep, analysis_tables, make_view
from rlplace.envs.instance import PlacementInstance
from rlplace.simulator import Simulator
from rlplace.simulator import records as r

ROOM = 1 << 16
"""Least entries of the groups of drawn moves together."""


class Guide:
    """Buffers and kernels of one instance.

    Attributes:
        instance: The instance.
        simulator: Its simulator, with a timeline.
        facts, view: Inputs of the kernels.
        moves: The moves that were drawn last.
        table: float32 [K, F], their features.
        count: Number of these moves.
    """

    def __init__(self, instance: PlacementInstance, moves: int, seed: int) -> None:
        problem = instance.problem
        self.instance = instance
        self.simulator = Simulator(problem, timeline=True)
        self.facts = analysis_tables(instance)
        self.view = make_view(self.facts)
        self.arguments = tuple(self.facts), tuple(self.view)
        room = max(ROOM, 4 * problem.num_groups)
        groups, targets = np.zeros((2, room), dtype=np.int32)
        self.moves = MoveSet(np.zeros(moves + 1, dtype=np.int64), groups, targets, np.zeros(moves, dtype=np.int8))
        self.table = np.zeros((moves, NUM_FEATURES), dtype=np.float32)
        self.count = 0
        self.state = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        self._trial = np.zeros(problem.num_groups, dtype=np.int32)

    def look(self, plan: NDArray[np.int32]) -> tuple[float, float]:
        """Simulates a plan and fills the view, but not for a step time of inf: a plan that cannot complete has no timeline.

        Returns:
            Step time and overflow.
        """
        step_s, overflow = self.simulator.evaluate(plan)
        if step_s < np.inf:
            work = self.simulator.work
            sent = work.transfer[: work.layout[r.TRANSFERS]]
            peak_bytes = self.simulator.peak_memory_bytes
            step = SimulatedStep(work.time_s[0], work.time_s[1], sent, peak_bytes, step_s, overflow)
            analyse(*self.arguments, plan, tuple(step))
        return step_s, overflow

    def draw(self, plan: NDArray[np.int32]) -> int:
        """Draws moves of the plan that was analysed last and computes their features; returns their number."""
        self.count = int(draw_moves(*self.arguments, plan, self.state, tuple(self.moves)))
        self._trial[:] = plan
        move_features(*self.arguments, plan, tuple(self.moves), self.count, self._trial, self.table)
        return self.count

    def move(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the groups that a move changes and the device each of them goes to, int32 [n] both."""
        part = slice(self.moves.ptr[number], self.moves.ptr[number + 1])
        return self.moves.groups[part], self.moves.targets[part]

    def moved(self, plan: NDArray[np.int32], number: int) -> NDArray[np.int32]:
        """Returns int32 [G], the plan after a move."""
        groups, targets = self.move(number)
        after = plan.copy()
        after[groups] = targets
        return after

    def price(self, plan: NDArray[np.int32], which: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns step time and overflow after each of the moves `which`."""
        if not len(which):
            return np.empty(0), np.empty(0)
        return self.simulator.evaluate_many(np.stack([self.moved(plan, int(number)) for number in which]))
