"""Live campaigns: the ranks of a job agree on a model and its problem, and time plans that rank 0 asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlplace.errors import InputError
from rlplace.measured.site import Site, site_of
from rlplace.problem import Problem
from rlplace.problem.io import problem_from_dict, problem_to_dict
from rlplace.runtime.distributed.job.measure import plan_timer
from rlplace.runtime.distributed.job.service import PlanService
from rlplace.runtime.distributed_text import broadcast_text, gather_texts
from rlplace.runtime.site import local_facts
from rlplace.zoo import LoadedModel


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
