"""Live campaigns: the ranks of a job agree on a model and its problem, and time plans that rank 0 asks for.

Plans timed on demand: rank 0 asks, every rank runs the plan's steps, rank 0 gets the times.

The processes of a job stay from plan to plan. Rank 0 may think between two plans for as long as it likes; the others wait.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError
from rlplace.files import check_header
from rlplace.measured.campaign import PlanFailed
from rlplace.measured.race import Race
from rlplace.measured.site import Site, site_of
from rlplace.plan.file import plan_from_dict
from rlplace.plan.plan import FORMAT, VERSION, PlacementPlan
from rlplace.problem import Problem
from rlplace.problem.io import problem_from_dict, problem_to_dict
from rlplace.runtime.distributed.job.measure import PlanTimer, plan_timer
from rlplace.runtime.distributed.ranks import broadcast_text, gather_texts
from rlplace.runtime.environment import local_facts
from rlplace.zoo import LoadedModel


class PlanService:
    """Times plans of one problem on the ranks of a job; called on rank 0, served by the others.

    An error that the plan itself causes, the same on all ranks, comes back as `PlanFailed`. One that hits a single rank in the
    middle of a step (out of memory, a crash) ends the job, since the other ranks wait for that rank: run it under
    ``torchrun --max-restarts N``, and the campaign goes on without that plan.
    """

    def __init__(self, timer: PlanTimer, problem: Problem, device: torch.device, *, engine: str | None = None) -> None:
        """Every rank makes one.

        Args:
            timer: Times plans of the model.
            problem: What every plan to be timed is made for.
            device: Where this process computes.
            engine: Which engine runs the plans; None: the one that fits each best.
        """
        self._timer, self._problem, self._device, self._engine = timer, problem, device, engine

    def __call__(self, plan: PlacementPlan, race: Race) -> PlanTiming:
        """Times a plan; see `rlplace.measured.campaign.Timer`."""
        broadcast_text(json.dumps({"plan": plan.to_dict(), "race": _race_data(race)}), self._device)
        return self._run(plan, race)

    def serve(self) -> None:
        """On ranks other than 0: times what rank 0 asks for, until it calls `release`."""
        while True:
            asked = json.loads(broadcast_text(None, self._device))
            if "plan" not in asked:
                return
            try:
                plan = plan_from_dict(check_header(asked["plan"], FORMAT, VERSION, "plan"))
                self._run(plan, _race_of(asked["race"]))
            except PlanFailed:  # rank 0 knows the same
                continue

    def release(self) -> None:
        """On rank 0: lets the others return from `serve`."""
        broadcast_text("{}", self._device)

    def _run(self, plan: PlacementPlan, race: Race) -> PlanTiming:
        failure = ""
        try:
            timed = self._timer(plan, self._problem, "", self._engine, over=race.over)
        except InputError as error:
            failure = str(error)
        except (MemoryError, torch.OutOfMemoryError) as error:
            if dist.get_world_size() > 1:
                raise
            raise PlanFailed("out_of_memory", str(error).splitlines()[0] if str(error) else "out of memory") from None
        if failure:
            raise PlanFailed("refused", failure)
        return timed.timing


def _race_data(race: Race) -> dict[str, float | int | str]:
    """JSON knows no infinity, so that is left out."""
    return {key: value for key, value in dataclasses.asdict(race).items() if value != float("inf")}


def _race_of(data: dict[str, float]) -> Race:
    return Race(**data)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LiveOptions:
    """How plans are timed.

    Attributes:
        optimizer: Name of the optimizer.
        replay: Sleep as long as ops are predicted to take instead of computing.
        engine: Which engine runs the plans; None: the one that fits each best.
        warmup: Steps before timing.
    """

    optimizer: str = "adam"
    replay: bool = False
    engine: str | None = None
    warmup: int = 1


def open_service(
    loaded: LoadedModel, problem: Problem | None, device: torch.device, options: LiveOptions, *, slept: Problem | None = None
) -> PlanService:
    """Every rank opens its part of the service; see `PlanService`.

    Args:
        loaded: The model with example inputs of one micro-batch, the same on every rank.
        problem: On rank 0: what plans are made for.
        device: Where this process computes.
        options: The same on every rank.
        slept: On rank 0, with replay: the problem whose times are slept, where it differs from `problem`.

    Raises:
        InputError: The job has fewer processes than the problem has devices.
    """
    text = None
    if dist.get_rank() == 0:
        assert problem is not None
        both = [problem_to_dict(problem), None if slept is None else problem_to_dict(slept)]
        text = json.dumps(both)
    heard = json.loads(broadcast_text(text, device))
    if dist.get_rank() != 0:
        problem, slept = (None if data is None else problem_from_dict(data) for data in heard)
    assert problem is not None
    if dist.get_world_size() != problem.num_devices:
        raise InputError(
            f"finetune: the cluster has {problem.num_devices} devices, the job {dist.get_world_size()} processes; "
            "start one for every device"
        )
    if slept is not None and slept.time_s.shape != problem.time_s.shape:
        raise InputError("finetune: what is replayed has other ops or devices than the problem; price the same model for it")
    replay = {"replay": options.replay, "replayed": slept}
    timer = plan_timer(loaded, device, optimizer=options.optimizer, warmup=options.warmup, **replay)
    return PlanService(timer, problem, device, engine=options.engine)


def job_site(device: torch.device, *, name: str = "", label: str = "") -> Site:
    """The site of a job; every rank calls it."""
    facts = gather_texts(dict(local_facts(device)), device)
    return site_of(facts, name=name, label=label, details={"backend": str(dist.get_backend())})
