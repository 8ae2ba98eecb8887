"""Live campaigns: rank 0 asks for plans of a problem, every rank runs a plan's steps, rank 0 gets the times.

The processes of a job stay from plan to plan. Rank 0 may think between two plans for as long as it likes; the others wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError
from rlplace.measured.campaign import PlanFailed
from rlplace.measured.race import Race
from rlplace.measured.site import Site, site_of
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.job.measure import PlanTimer, plan_timer
from rlplace.runtime.distributed.ranks import broadcast_object, gather_objects
from rlplace.runtime.environment import local_facts
from rlplace.zoo import LoadedModel


@dataclass(frozen=True, eq=False)
class PlanService:
    """Times plans of one problem on the ranks of a job; every rank makes one. Called on rank 0, served by the others.

    An error that the plan itself causes, the same on all ranks, comes back as `PlanFailed`. One that hits a single rank in the
    middle of a step (out of memory, a crash) ends the job, since the other ranks wait for that rank: run it under
    ``torchrun --max-restarts N``, and the campaign goes on without that plan.

    Attributes:
        timer: Times plans of the model.
        problem: What every plan to be timed is made for.
    """

    timer: PlanTimer
    problem: Problem

    def __call__(self, plan: PlacementPlan, race: Race) -> PlanTiming:
        """Times a plan; see `rlplace.measured.campaign.Timer`."""
        broadcast_object((plan, race))
        return self._run(plan, race)

    def serve(self) -> None:
        """On ranks other than 0: times what rank 0 asks for, until it calls `release`."""
        while True:
            asked = broadcast_object(None)
            if asked is None:
                return
            try:
                self._run(*asked)
            except PlanFailed:  # rank 0 knows the same
                continue

    def release(self) -> None:
        """On rank 0: lets the others return from `serve`."""
        broadcast_object(None)

    def _run(self, plan: PlacementPlan, race: Race) -> PlanTiming:
        try:
            return self.timer(plan, self.problem, race=race)
        except InputError as error:
            raise PlanFailed("refused", str(error)) from None
        except (MemoryError, torch.OutOfMemoryError) as error:
            if dist.get_world_size() > 1:
                raise
            raise PlanFailed("out_of_memory", str(error).splitlines()[0] if str(error) else "out of memory") from None


def open_service(
    loaded: LoadedModel, problem: Problem | None, device: torch.device, *, slept: Problem | None = None, **options: Any
) -> PlanService:
    """Every rank opens its part of the service; see `PlanService`.

    Args:
        loaded: The model with example inputs of one micro-batch, the same on every rank.
        problem: On rank 0: what plans are made for.
        device: Where this process computes.
        slept: On rank 0, with replay: the problem whose times are slept, where it differs from `problem`.
        **options: Fields of `PlanTimer`, the same on every rank; one step is warm-up unless they say otherwise.

    Raises:
        InputError: The job has fewer processes than the problem has devices.
    """
    problem, slept = broadcast_object((problem, slept))
    assert problem is not None
    if dist.get_world_size() != problem.num_devices:
        raise InputError(
            f"finetune: the cluster has {problem.num_devices} devices, the job {dist.get_world_size()} processes; "
            "start one for every device"
        )
    if slept is not None and slept.time_s.shape != problem.time_s.shape:
        raise InputError("finetune: what is replayed has other ops or devices than the problem; price the same model for it")
    return PlanService(plan_timer(loaded, device, **{"warmup": 1, "replayed": slept, **options}), problem)


def job_site(device: torch.device, *, name: str = "", label: str = "") -> Site:
    """The site of a job; every rank calls it."""
    facts = gather_objects(dict(local_facts(device)))
    return site_of(facts, name=name, label=label, details={"backend": str(dist.get_backend())})
