"""``rlplace/Placement-v0``: place one group a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.backends import SimulatedBackend
from rlplace.envs.base import Common, Observation, PlacerEnv, greedy_fit
from rlplace.envs.construction import CONSTRUCTION_FEATURES, NUM_CONSTRUCTION, Construction
from rlplace.envs.instance import FinalReward, Instance, infeasible_reward, log_ratio
from rlplace.placement.common.repair import repair
from rlplace.problem import Problem


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
        problems: Sequence[Problem | Instance] | None = None,
        *,
        reward: FinalReward = log_ratio,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(problems, **common)
        self._reward = reward
        self._make_spaces(self.max_devices, NUM_CONSTRUCTION)
        self._repairer = SimulatedBackend()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; ``options={"problem": i}`` chooses the problem."""
        super().reset(seed=seed)
        self._draw_instance(options)
        self._construction = Construction(self.instance)
        self._plan = self._construction.plan
        self._done = False
        return self._observe(), {"problem": self._index}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Places the current group on device `action`."""
        device, state = self._check_action(action), self._construction
        if not self.action_masks()[device]:
            self._done = True
            overflow = state.overflow(device)
            info = {"problem": self._index, "feasible": False, "illegal": True, "relative_overflow": overflow}
            return self._observe(), infeasible_reward(overflow), True, False, info
        state.place(device)
        stuck = not state.done and not state.legal().any()
        if not (state.done or stuck):
            return self._observe(), 0.0, False, False, {"problem": self._index}
        self._done = True
        self._plan, reward, info = self.finish(self._index, self._plan, stuck=stuck)
        return self._observe(), reward, True, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Bool [max_devices]; when nothing is legal at the start, the allowed devices (the episode then ends infeasible)."""
        mask = np.zeros(self.max_devices, dtype=bool)
        legal = self._construction.legal()
        if not legal.any():
            legal = self.instance.allowed[self.current_group]
        mask[: len(legal)] = legal
        return mask

    def current_plan(self) -> NDArray[np.int32]:
        """int32 [G], -1 where a group is not placed yet."""
        return self._plan

    @property
    def current_group(self) -> int:
        """The group that the next action places."""
        return self._construction.group

    def finish(self, index: int, plan: NDArray[np.int32], *, stuck: bool) -> tuple[NDArray[np.int32], float, dict[str, Any]]:
        """The plan at the end of an episode, its reward and its info.

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

    def _observe(self) -> Observation:
        state, devices = self._construction, self.instance.problem.num_devices
        table = np.zeros((self.max_devices, NUM_CONSTRUCTION), dtype=np.float32)
        groups = np.full(self.max_devices, -1, dtype=np.int32)
        if not self._done:
            table[:devices] = state.table()
            groups[:devices] = state.group
        progress = state.placed / len(state.plan)
        return self._assemble(self._plan, table, groups, [progress, state.largest_load])
