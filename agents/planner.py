"""The agent as a planner: the best of the classical floor, sampled rollouts and a search guided by the policy.

Problem: any. Algorithm: start from the plan of `best`; roll the policy out from it `samples` times; spend what is left of
the budget on the guided search; answer with the best feasible plan seen. By construction the answer is never worse than
`best`. The first, greedy rollout alone is reported as ``single_rollout`` in the plan's `predicted`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.agents.checkpoint import Checkpoint, load_checkpoint
from rlplace.agents.search import Search, warm_up
from rlplace.envs.instance import Instance, make_instance
from rlplace.errors import InfeasibleError
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.planners import get_planner
from rlplace.planners.common.evaluate import Execution
from rlplace.planners.common.shortage import check_possible
from rlplace.problem import Problem
from rlplace.simulator import simulate

ROLLOUT_LENGTH = 12
_SAMPLE_SHARE = 0.05  # of the budget, after which no further rollout begins


def agent(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    agent: str = "default",
    samples: int = 8,
    calls: int | None = None,
    **execution: Any,
) -> PlacementPlan:
    """Places with a trained agent.

    Args:
        problem: The problem.
        seed: Seed of samples and search.
        time_limit_s: Wall time for floor, samples and search; default 5 when `calls` is not given, else no limit.
        agent: Name of a shipped checkpoint, or a checkpoint folder.
        samples: Rollouts of the policy before the search.
        calls: Simulator calls after the floor; default no limit. With `calls` and no time limit the answer is deterministic.
        **execution: Fields of `rlplace.planners.common.evaluate.Execution`.

    Raises:
        InfeasibleError: Neither the classical planners nor the search find a plan that fits.
    """
    return load_agent(agent).place(problem, seed=seed, time_limit_s=time_limit_s, samples=samples, calls=calls, **execution)


@dataclass(frozen=True, eq=False)
class Agent:
    """A loaded checkpoint that places problems.

    Attributes:
        checkpoint: Network and how it was trained.
    """

    checkpoint: Checkpoint

    def place(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        time_limit_s: float | None = None,
        samples: int = 8,
        calls: int | None = None,
        **execution: Any,
    ) -> PlacementPlan:
        """Places one problem; see `agent` for the arguments."""
        run = Execution(**execution)
        check_possible(problem)  # no search finds what a bound rules out
        warm_up()
        begin = time.perf_counter()
        if time_limit_s is None and calls is None:
            time_limit_s = 5.0
        floor, reason = _floor(problem, seed, time_limit_s, run)
        if problem.num_devices == 1 and floor is None:
            raise reason or InfeasibleError("the problem does not fit on its only device; use more devices or less memory")
        instance = make_instance(
            problem, floor=None if floor is None else floor.device_of_group, compute_floor=False, execution=run
        )
        search = Search(
            instance=instance,
            network=self.checkpoint.network,
            rng=np.random.default_rng(seed),
            max_calls=calls if calls is not None else 1 << 60,
            deadline=math.inf if time_limit_s is None else begin + time_limit_s,
            best_plan=_start(instance),
        )
        single = self._sample(search, samples)
        if self.checkpoint.environment == "rlplace/Refinement-v0" and problem.num_devices > 1:
            search.run_guided()
        best, priority = search.best_plan, None
        timeline = simulate(problem, best, **run.arguments)
        if floor is not None and not (timeline.feasible and timeline.step_time_s <= floor.predicted["step_time_s"]):
            best, priority = floor.device_of_group, floor.priority
            timeline = simulate(problem, best, priority=priority, **run.arguments)
        if not timeline.feasible:
            raise reason or InfeasibleError("no feasible plan found; relax memory, or raise the time limit")
        predicted = {
            **timeline.predicted(problem),
            "floor_step_time_s": None if floor is None else floor.predicted["step_time_s"],
            "single_rollout_step_time_s": single,
            "search_calls": search.calls,
            "agent": self.checkpoint.name,
        }
        return make_plan(problem, best, planner="agent", seed=seed, predicted=predicted, priority=priority, **run.arguments)

    def finetune(self, problems: Sequence[Problem], *, steps: int = 20_000, seed: int = 0, out: str | Path) -> Agent:
        """Continues training on `problems` in the simulator and returns the new agent, saved in the folder `out`."""
        from rlplace.agents.train import TrainConfig, train

        environment = "placement" if self.checkpoint.environment.endswith("Placement-v0") else "refinement"
        sizes = self.checkpoint.network.config.to_dict()
        config = TrainConfig.load(environment, steps=steps, seed=seed, **sizes)
        train(problems, config, out, start=self.checkpoint)
        return load_agent(out)

    def _sample(self, search: Search, samples: int) -> float | None:
        """Runs the rollouts; returns the step time of the first, greedy one."""
        if self.checkpoint.environment == "rlplace/Placement-v0":
            from rlplace.agents.construct import construct

            plans = (construct(search.instance, self.checkpoint.network, search.rng, greedy=n == 0) for n in range(samples))
        else:
            plans = None
        start = search.best_plan.copy()
        first: float | None = None
        for number in range(samples):
            if search.instance.problem.num_devices == 1 or search.spent() > (_SAMPLE_SHARE if number else 0.99):
                break
            if plans is None:
                search.run_rollout(start, ROLLOUT_LENGTH, temperature=0.0 if number == 0 else 1.0)
            else:
                search.try_plan(next(plans))
            if number == 0:
                first = search.best.step_time_s if search.best.feasible else None
        return first


def load_agent(name: str | Path = "default") -> Agent:
    """Loads a trained agent: the name of a shipped checkpoint, or a checkpoint folder."""
    return Agent(load_checkpoint(name))


def _floor(
    problem: Problem, seed: int, time_limit_s: float | None, run: Execution
) -> tuple[PlacementPlan | None, InfeasibleError | None]:
    try:
        return get_planner("best")(problem, seed=seed, time_limit_s=time_limit_s, **run.arguments), None
    except InfeasibleError as error:
        return None, error


def _start(instance: Instance) -> NDArray[np.int32]:
    from rlplace.envs.base import greedy_fit

    return instance.floor.copy() if instance.floor is not None else greedy_fit(instance)
