"""Live timing: rank 0 asks for plans of a problem, every rank runs a plan's steps, rank 0 gets the times.

The processes of a job stay from plan to plan. Rank 0 may think between two plans for as long as it likes; the others wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.job.measure import PlanTimer, plan_timer
from rlplace.runtime.distributed.ranks import broadcast_object
from rlplace.zoo import LoadedModel


@dataclass(frozen=True, eq=False)
class PlanService:
    """Times plans of one problem on the ranks of a job; every rank makes one. Called on rank 0, served by the others.

    An error that the plan itself causes is the same on all ranks and raised on rank 0. One that hits a single rank in the
    middle of a step (out of memory, a crash) ends the job, since the other ranks wait for that rank.

    Attributes:
        timer: Times plans of the model.
        problem: What every plan to be timed is made for.
    """

    timer: PlanTimer
    problem: Problem

    def __call__(self, plan: PlacementPlan) -> PlanTiming:
        """Times a plan.

        Raises:
            InputError: It cannot run.
        """
        broadcast_object(plan)
        return self.timer(plan, self.problem)

    def serve(self) -> None:
        """On ranks other than 0: times what rank 0 asks for, until it calls `release`."""
        while True:
            plan = broadcast_object(None)
            if plan is None:
                return
            try:
                self.timer(plan, self.problem)
            except InputError:  # rank 0 knows the same
                continue

    def release(self) -> None:
        """On rank 0: lets the others return from `serve`."""
        broadcast_object(None)


def open_service(loaded: LoadedModel, problem: Problem | None, device: torch.device, **options: Any) -> PlanService:
    """Every rank opens its part of the service; see `PlanService`.

    Args:
        loaded: The model with example inputs of one micro-batch, the same on every rank.
        problem: On rank 0: what plans are made for.
        device: Where this process computes.
        **options: Fields of `PlanTimer`, the same on every rank; one step is warm-up unless they say otherwise.

    Raises:
        InputError: The job has fewer processes than the problem has devices.
    """
    problem = broadcast_object(problem)
    assert problem is not None
    if dist.get_world_size() != problem.num_devices:
        raise InputError(
            f"measure: the problem has {problem.num_devices} devices, the job {dist.get_world_size()} processes; start one for "
            "every device"
        )
    return PlanService(plan_timer(loaded, device, **{"warmup": 1, **options}), problem)
