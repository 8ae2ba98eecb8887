"""Steps that only wait: every pass sleeps as long as the priced problem says, while real tensors cross the real links.

For clusters of more hosts than there are processors: what is measured is the network and the schedule, not the arithmetic.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from rlplace.runtime.distributed.execution.stage_graph import StageGraphEngine
from rlplace.runtime.distributed.graph.cut import Cut, Segment
from rlplace.runtime.distributed.graph.order import Expected, segment_seconds
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own

_WAKE_S = 1e-4  # a sleeping process wakes up about so late


class ReplayEngine(StageGraphEngine):
    """The stage-graph engine without arithmetic: values and gradients are of the right size and hold nothing.

    The order of segments follows the times of the plan's problem, as in any engine; how long they sleep follows `slept`.
    """

    def __init__(
        self, slept: Expected, cut: Cut, ranks: Ranks, own: Own, schedule: str, expected: Expected | None = None
    ) -> None:
        super().__init__(cut, ranks, own, schedule, expected)
        self._slept = slept
        self._seconds = segment_seconds(self.cut, slept)

    def _forward(self, state: Any, segment: Segment, number: int, training: bool) -> None:
        end = time.perf_counter() + self._seconds[segment.index][0]
        graph = self.cut.graph
        for name in segment.reads:
            if (name, number) not in state.leaves:
                state.leaves[name, number] = state.values[name, number]
        for name in segment.makes:
            state.values[name, number] = graph.layout[name].empty(self.ranks.device)
        sleep_until(end)

    def _backward(self, state: Any, segment: Segment, number: int) -> None:
        end = time.perf_counter() + self._seconds[segment.index][1]
        for name in segment.makes:
            state.values.pop((name, number), None)
            state.gradients.pop((name, number), None)
        for name in segment.held:
            parameter = self.parameters.get(name)
            if parameter is not None and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sleep_until(end)

    def update_seconds(self) -> float:
        """What the optimizer takes on this rank."""
        plan_device = self.ranks.plan_device
        if plan_device is None:
            return 0.0
        shares = [share for segment in self._mine.values() for share in segment.groups.items() if share[0] >= 0]
        return float(sum(self._slept.update_s[group, plan_device] * share for group, share in shares))


def sleep_until(end_s: float) -> None:
    """Sleeps to a moment of the monotonic clock; the last tenth of a millisecond is spent awake."""
    left = end_s - time.perf_counter() - _WAKE_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < end_s:
        pass
