"""``rlplace/Placement-v0``: place one group a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.backends import SimulatedBackend
from rlplace.envs.base import Common, PlacerEnv, greedy_fit
from rlplace.envs.construction import CONSTRUCTION_FEATURES, NUM_CONSTRUCTION
from rlplace.envs.instance import FinalReward, PlacementInstance, infeasible_reward, log_ratio
from rlplace.placement.common.repair import repair
from rlplace.problem import Problem

if TYPE_CHECKING:
    from rlplace.envs.batch import PlacementBatch


class PlacementEnv(PlacerEnv):
    """Places the groups of a problem one by one; the finished plan is simulated (or measured).

    ## Description
    Each episode draws a problem, or takes ``options={"problem": i}``. Groups come in
    the instance's order: depth-first, or by falling upward rank (`rlplace.envs.instance.side_by_side`).

    ## Action space
    ``Discrete(max_devices)``: the device of the current group. `action_masks` marks the legal ones: devices that exist, on
    which every op of the group can run, that a fixed device admits, and whose provable memory (resident bytes, saved
    activations, largest op) stays within the limit.

    ## Observation space
    | key | dtype, shape | meaning |
    |---|---|---|
    | graph | int32 (1,) | number of the problem in the bank |
    | device_of_group | int32 (max_groups,) | device of each group, -1 not placed or padding |
    | candidates | float32 (max_devices * F,) | the current group on each device, see `CONSTRUCTION_FEATURES` |
    | candidate_group | int32 (max_devices,) | the current group, -1 for devices that do not exist |
    | context | float32 (8,) | devices, groups, memory pressure, progress, largest load |

    ``observation="full"`` adds nodes, edges and edge_features of the graph.

    ## Rewards
    0 until the last step, then log(step time of the best classical plan / step time), or -(5 + log(1 + relative
    overflow)) when the plan does not fit even after the shared memory repair.

    ## Starting state
    Nothing is placed.

    ## Episode end
    Terminates when all groups are placed, when no device is legal for the next group (the rest is then placed for memory
    and repaired), or at an illegal action. Never truncates.

    The last info holds ``device_of_group``, int32 (max_groups,) with -1 as padding, ``feasible``, ``step_time_s``,
    ``relative_overflow``, and by device (max_devices,) ``compute_s``, ``transfer_s`` (of transfers that leave it), ``idle_s``
    and ``peak_memory_bytes``.

    ## Arguments
    problems: problems or instances. backend: default `SimulatedBackend`. max_devices, max_groups: sizes of the spaces,
    default the largest problem. reward: called with step time and reference. observation: "indexed" or "full".

    ## Version history
    v0: first version.
    """

    FEATURES: ClassVar[tuple[str, ...]] = CONSTRUCTION_FEATURES
    """Names of the columns of `candidates`."""

    def __init__(
        self,
        problems: Sequence[Problem | PlacementInstance] | None = None,
        *,
        reward: FinalReward = log_ratio,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(problems, **common)
        self._reward = reward
        self._make_spaces(self.max_devices, NUM_CONSTRUCTION)
        self._repairer = SimulatedBackend()

    def batch_of(self, count: int, threads: int = 1) -> PlacementBatch:
        """Returns episodes of `count` environments by the rules of this one."""
        from rlplace.envs.batch import PlacementBatch

        return PlacementBatch(self, count, threads)

    @property
    def current_group(self) -> int:
        """The group that the next action places."""
        return int(self.instance.order[min(int(self.batch.state.placed[0]), self.instance.problem.num_groups - 1)])

    def finish(self, index: int, plan: NDArray[np.int32], *, stuck: bool) -> tuple[NDArray[np.int32], float, dict[str, Any]]:
        """Returns the plan at the end of an episode, its reward and its info.

        Args:
            index: Number of the problem.
            plan: int32 [G], -1 for groups that are not placed.
            stuck: Whether the rest must be placed for memory.
        """
        instance, repaired = self.instances[index], stuck
        plan = np.where(plan >= 0, plan, greedy_fit(instance)).astype(np.int32) if stuck else plan
        result = self.backend.evaluate(instance, plan)
        if not result.feasible:
            mended = repair(instance.problem, plan, self._repairer.simulator(instance))
            if mended is not None:
                plan, repaired = np.asarray(mended, dtype=np.int32), True
                result = self.backend.evaluate(instance, plan)
        reward = infeasible_reward(result.relative_overflow)
        if result.feasible:
            reward = self._reward(result.step_time_s, instance.reference_step_time_s)
        info = self.closing_info(index, result.step_time_s, result.relative_overflow, plan)
        return plan, reward, {**info, "repaired": repaired}
