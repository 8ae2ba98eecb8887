"""`Guide`: simulates plans of one instance, looks at them, draws moves, describes and prices them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.guide import view as view_of
from rlplace.envs.guide.analysis import analyse
from rlplace.envs.guide.draw import SHARES, draw_moves
from rlplace.envs.guide.facts import make_facts
from rlplace.envs.guide.features import NUM_FEATURES, move_features
from rlplace.envs.guide.view import make_view
from rlplace.envs.instance import Instance
from rlplace.simulator import Simulator
from rlplace.simulator import records as r

_ROOM = 1 << 16


class Guide:
    """Buffers and kernels of one instance.

    Attributes:
        instance: The instance.
        simulator: Its simulator, with a timeline.
        facts, view: Inputs of the kernels.
        ptr: int64 [K + 1]. groups, targets: int32. kinds: int8 [K]. table: float32 [K, F]. The moves that were drawn last.
        count: Number of these moves.
    """

    def __init__(self, instance: Instance, moves: int, seed: int) -> None:
        problem = instance.problem
        self.instance = instance
        self.simulator = Simulator(problem, timeline=True)
        self.facts = make_facts(instance)
        channels = int(self.facts.channels.max(initial=-1)) + 1
        self.view = make_view(self.facts, channels)
        self.arguments = tuple(self.facts), tuple(self.view)
        room = max(_ROOM, 4 * problem.num_groups)
        self.ptr = np.zeros(moves + 1, dtype=np.int64)
        self.groups, self.targets = np.zeros(room, dtype=np.int32), np.zeros(room, dtype=np.int32)
        self.kinds = np.zeros(moves, dtype=np.int8)
        self.table = np.zeros((moves, NUM_FEATURES), dtype=np.float32)
        self.count = 0
        self.state = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        self._trial = np.zeros(problem.num_groups, dtype=np.int32)

    def look(self, plan: NDArray[np.int32]) -> tuple[float, float]:
        """Simulates a plan and fills the view, but not for a step time of inf: a plan that cannot complete has no timeline.

        Returns:
            Step time and overflow.
        """
        step, overflow = self.simulator.evaluate(plan)
        if step == np.inf:
            return step, overflow
        work = self.simulator.work
        sent = work.transfer[: work.layout[r.TRANSFERS]]
        analyse(*self.arguments, plan, work.time_s[0], work.time_s[1], sent, self.simulator.peak_memory_bytes, step, overflow)
        return step, overflow

    def draw(self, plan: NDArray[np.int32], shares: NDArray[np.float64] = SHARES) -> int:
        """Draws moves of the plan that was analysed last and computes their features."""
        self.count = int(draw_moves(*self.arguments, plan, self.state, shares, self.ptr, self.groups, self.targets, self.kinds))
        self._trial[:] = plan
        move_features(
            *self.arguments, plan, self.ptr, self.groups, self.targets, self.kinds, self.count, self._trial,
            self.table,
        )  # fmt: skip
        return self.count

    def move(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The groups that a move changes and the device each of them goes to, int32 [n] both."""
        part = slice(self.ptr[number], self.ptr[number + 1])
        return self.groups[part], self.targets[part]

    def moved(self, plan: NDArray[np.int32], number: int) -> NDArray[np.int32]:
        """int32 [G], the plan after a move."""
        groups, targets = self.move(number)
        after = plan.copy()
        after[groups] = targets
        return after

    def price(self, plan: NDArray[np.int32], which: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Step time and overflow after each of the moves `which`."""
        if not len(which):
            return np.empty(0), np.empty(0)
        return self.simulator.evaluate_many(np.stack([self.moved(plan, int(number)) for number in which]))


def blind_view(guide: Guide, plan: NDArray[np.int32]) -> None:
    """Fills the guide's view for a plan that cannot complete, which has no timeline: only the placement is known.

    Loads and provable bytes are true, every group counts as tight and nothing waits.
    The unit of time, which is the step time elsewhere, is the instance's lower reference.

    Args:
        guide: The guide whose view is filled.
        plan: int32 [G].
    """
    facts, view = guide.facts, guide.view
    devices, groups = len(view.load), np.arange(len(plan))
    for name, unknown in view._asdict().items():
        if name != "arrival":
            unknown[:] = 0.0
    view.load[:] = np.bincount(plan, weights=facts.group_s[groups, plan], minlength=devices)
    view.pinned[:] = view.peak[:] = np.bincount(plan, weights=facts.pinned, minlength=devices)
    view.tightness[:] = view.part[:] = 1.0
    view.gap[:] = view.margin[:] = np.inf  # no transfer is known to be urgent
    view.total[view_of.STEP] = guide.instance.reference_step_time_s
    view.total[view_of.WORK], view.total[view_of.BUSIEST] = view.load.sum(), view.load.max()
