"""Steps that only wait: ops sleep as long as the priced problem says, while real tensors cross the real links.

For clusters of more hosts than there are processors: what is measured is the network and the order, not the arithmetic.
"""

from __future__ import annotations

import operator
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rlplace.plan.device_map import plan_groups
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.problem.problem import FORWARD, UPDATE
from rlplace.runtime.distributed.joint.assign import JointPlacement
from rlplace.runtime.distributed.joint.engine import Engine
from rlplace.runtime.distributed.joint.views import results_of
from rlplace.runtime.distributed.ranks import Ranks

_WAKE_S = 1e-4  # a sleeping process wakes up about so late


class ReplayEngine(Engine):
    """The engine without arithmetic: values and gradients are of the right size and hold nothing."""

    def __init__(
        self, placement: JointPlacement, ranks: Ranks, tensors: Mapping[str, torch.Tensor], plan: PlacementPlan, slept: Problem
    ) -> None:
        """Prepares a process.

        Args:
            placement: What runs where.
            ranks: Which process this is.
            tensors: What this process holds.
            plan: The plan.
            slept: A problem with the plan's groups; its times are slept, those of a group in equal parts by its nodes.
        """
        super().__init__(placement, ranks, tensors)
        groups = plan_groups(plan)
        number_of = {str(group.get("name", number)): number for number, (group, _) in enumerate(groups)}
        group_of = {op: number for number, (group, _) in reversed([*enumerate(groups)]) for op in group.get("ops", ())}
        total: dict[tuple[int, str], float] = defaultdict(float)
        for group, phase, time_s in zip(slept.op_group.tolist(), slept.op_phase.tolist(), slept.time_s, strict=True):
            key = group, "update" if phase == UPDATE else "forward" if phase == FORWARD else "backward"
            total[key] += float(time_s[groups[group][1]])
        key_of: dict[fx.Node, tuple[int, str]] = {}
        for node, there in placement.device_of.items():
            op = node.meta["owner"]
            if there == ranks.rank and op in group_of and node.target is not operator.getitem:
                group, kind = group_of[op], "backward" if node.meta["backward"] else "forward"
                apart = number_of.get(f"{groups[group][0].get('name')}.backward", group)
                key_of[node] = (apart if node.meta["backward"] else group), kind
        nodes = Counter(key_of.values())
        self._seconds = {node: total[key] / nodes[key] for node, key in key_of.items()}
        here = [number for number, (_, device) in enumerate(groups) if device == ranks.rank]
        self.update_s = sum(total[number, "update"] for number in here)
        self._free_s = 0.0

    def target_of(self, node: fx.Node) -> Any:
        """Sleeps, and returns what the node makes."""
        made = [(result.args[1], result.meta["val"]) for result in results_of(node) if result is not node]

        def sleep(*_: Any, **__: Any) -> Any:
            self._free_s = max(self._free_s, time.perf_counter() - _WAKE_S) + self._seconds.get(node, 0.0)
            values = {index: self._empty(like) for index, like in made} or self._empty(node.meta["val"])
            sleep_until(self._free_s)
            return values

        return sleep

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(tuple(like.shape), dtype=like.dtype, device=self.ranks.device)


def sleep_until(end_s: float) -> None:
    """Sleeps to a moment of the monotonic clock; the last tenth of a millisecond is spent awake."""
    left = end_s - time.perf_counter() - _WAKE_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < end_s:
        pass
