"""``rlplace/Placement-v0``: place one group a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from rlplace.envs import construction as c
from rlplace.envs.backends import SimulatedBackend
from rlplace.envs.base import Common, Infos, PlacerEnv, Rows, greedy_fit
from rlplace.envs.construction import CONSTRUCTION_FEATURES, NUM_CONSTRUCTION
from rlplace.envs.instance import FinalReward, PlacementInstance, infeasible_reward, log_ratio
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
        problems: Sequence[Problem | PlacementInstance] | None = None,
        *,
        reward: FinalReward = log_ratio,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(problems, **common)
        self._reward = reward
        self._make_spaces(self.max_devices, NUM_CONSTRUCTION)
        self._repairer = SimulatedBackend()

    @cached_property
    def state(self) -> c.ConstructionState:  # type: ignore[override]
        """The episodes."""
        return c.construction_state(self.count, self.max_groups, self.max_devices)

    @cached_property
    def _bank(self) -> tuple[Any, ...]:
        return tuple(c.construction_bank(self.instances))

    def _run(self, rows: Rows, actions: NDArray[np.int64], begin: bool) -> None:
        bank, state = self._bank, tuple(self.state)
        self._spread(lambda part, _: c.construct(bank, state, part, actions, begin), rows)

    def begin(self, rows: Rows, random: Sequence[np.random.Generator], options: Mapping[str, Any]) -> None:
        """Begins episodes, see `PlacerEnv.begin`."""
        self.state.instance[rows] = self.index[rows]
        self._run(rows, self.state.instance, True)

    def advance(self, rows: Rows, actions: NDArray[np.int64], rewards: NDArray[np.float64]) -> dict[int, Infos]:
        """Steps environments, see `PlacerEnv.advance`."""
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
            plan = state.plan[e, : self.instances[number].problem.num_groups]
            plan[:], rewards[e], closing[e] = self.finish(number, plan, stuck=bool(state.status[e] == c.STUCK))
        return closing

    @property
    def current_group(self) -> int:
        """The group that the next action places."""
        return int(self.instance.order[min(int(self.state.placed[0]), self.instance.problem.num_groups - 1)])

    def finish(self, index: int, plan: NDArray[np.int32], *, stuck: bool) -> tuple[NDArray[np.int32], float, Infos]:
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
