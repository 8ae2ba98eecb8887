"""``rlplace/Placement-v0`` as a vector environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.base import Observation
from rlplace.envs.instance import infeasible_reward
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.vector.base import Infos, PlacerVectorEnv
from rlplace.envs.vector.construct import ILLEGAL, RUNNING, STUCK, builds_for, construct, plots_of


def warm_up() -> None:
    """Compiles the kernel of construction, or loads it."""
    PlacementVectorEnv(1, threads=1).reset(seed=0)


class PlacementVectorEnv(PlacerVectorEnv):
    """N times `rlplace.envs.PlacementEnv`: a group of each is placed and the next one described in one compiled call."""

    kind = PlacementEnv
    single: PlacementEnv

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        """See the base; options are also those of `PlacementEnv`."""
        super().__init__(num_envs, **options)
        single = self.single
        self._plots = tuple(plots_of(single.instances))
        self._builds = builds_for(num_envs, single.max_groups, single.max_devices)

    def action_masks(self) -> NDArray[np.bool_]:
        """Bool [N, max_devices]."""
        return self._builds.legal.copy()

    def _run(self, rows: NDArray[np.int64], actions: NDArray[np.int64], begin: bool) -> None:
        builds = tuple(self._builds)
        self._spread(lambda part, _: construct(self._plots, builds, part, actions, begin), rows)

    def _begin(self, rows: NDArray[np.int64], options: dict[str, Any]) -> None:
        self._builds.instance[rows] = self._index[rows]
        self._run(rows, self._builds.instance, True)

    def _advance(self, rows: NDArray[np.int64], actions: NDArray[np.int64], rewards: NDArray[np.float64]) -> dict[int, Infos]:
        builds = self._builds
        self._run(rows, actions, False)
        closing: dict[int, Infos] = {}
        for e in rows[builds.status[rows] != RUNNING].tolist():
            number = int(self._index[e])
            if builds.status[e] == ILLEGAL:
                overflow = float(builds.overflow[e])
                rewards[e] = infeasible_reward(overflow)
                closing[e] = {"problem": number, "feasible": False, "illegal": True, "relative_overflow": overflow}
                continue
            plan = builds.plan[e, : self.instances[number].problem.num_groups]
            plan[:], rewards[e], closing[e] = self.single.finish(number, plan, stuck=bool(builds.status[e] == STUCK))
        return closing

    def _observe(self) -> Observation:
        builds = self._builds
        return {
            **self._graph(), "device_of_group": builds.plan.copy(), "candidates": builds.table.copy(),
            "candidate_group": builds.group.copy(), "context": builds.context.copy(),
        }  # fmt: skip
