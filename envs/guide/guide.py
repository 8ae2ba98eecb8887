"""`Guide`: simulates plans of one instance, looks at them, draws moves, describes and prices them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs.guide import facts as facts_of
from rlplace.envs.guide import view as view_of
from rlplace.envs.guide.analysis import analyse
from rlplace.envs.guide.draw import SHARES, draw_moves
from rlplace.envs.guide.facts import Facts, make_facts
from rlplace.envs.guide.features import NUM_FEATURES, move_features
from rlplace.envs.guide.view import View, make_view
from rlplace.envs.instance import Instance
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
        room = max(ROOM, 4 * problem.num_groups)
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
        if step < np.inf:
            self.read(plan, step, overflow)
        return step, overflow

    def read(self, plan: NDArray[np.int32], step: float, overflow: float) -> None:
        """Fills the view from the plan that was simulated last, with these results."""
        work = self.simulator.work
        sent = work.transfer[: work.layout[r.TRANSFERS]]
        analyse(*self.arguments, plan, work.time_s[0], work.time_s[1], sent, self.simulator.peak_memory_bytes, step, overflow)

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
        """Returns the groups that a move changes and the device each of them goes to, int32 [n] both."""
        part = slice(self.ptr[number], self.ptr[number + 1])
        return self.groups[part], self.targets[part]

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


def blind_view(guide: Guide, plan: NDArray[np.int32]) -> None:
    """Fills the guide's view for a plan that cannot complete, which has no timeline: only the placement is known.

    Loads and provable bytes are true, every group counts as tight and nothing waits.
    The unit of time, which is the step time elsewhere, is the instance's lower reference.

    Args:
        guide: The guide whose view is filled.
        plan: int32 [G].
    """
    _blind(*guide.arguments, plan, guide.instance.reference_step_time_s)


@inner
def blind(facts, view, plan, reference_s):  # type: ignore[no-untyped-def]
    """`blind_view` of `Facts` and `View` as plain tuples."""
    f, v = Facts(*facts), View(*view)
    for whole in (
        v.load, v.peak, v.pinned, v.channel, v.slack, v.wait, v.queue, v.urgent, v.chain, v.blocked, v.sent, v.hurried, v.total,
        v.late,
    ):  # fmt: skip
        whole[:] = 0.0
    for table in (v.saved, v.idle, v.crowd, v.shared, v.free_bins):
        table[:] = 0.0
    for cube in (v.clash, v.critical_bins):
        cube[:] = 0.0
    v.before[:] = 0
    for g in range(len(plan)):
        v.load[plan[g]] += f.group_s[g, plan[g]]
        v.pinned[plan[g]] += f.pinned[g]
    v.peak[:] = v.pinned
    v.tightness[:] = 1.0
    v.part[:] = 1.0
    v.gap[:] = np.inf  # no transfer is known to be urgent
    v.margin[:] = np.inf
    v.total[view_of.STEP], v.total[view_of.WORK], v.total[view_of.BUSIEST] = reference_s, v.load.sum(), v.load.max()


def _compile(stamp):  # type: ignore[no-untyped-def]
    @entry
    def blind_view(facts, view, plan, reference_s):  # type: ignore[no-untyped-def]
        _ = stamp
        blind(facts, view, plan, reference_s)

    return blind_view


_blind = _compile(stamp_of(facts_of, view_of))
