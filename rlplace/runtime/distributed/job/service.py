"""Plans timed on demand: rank 0 asks, every rank runs the plan's steps, rank 0 gets the times.

The processes of a job stay from plan to plan. Rank 0 may think between two plans for as long as it likes; the others wait.
"""

from __future__ import annotations

import dataclasses
import json

import torch
import torch.distributed as dist

from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError
from rlplace.files import check_header
from rlplace.measured.campaign import PlanFailed
from rlplace.measured.race import Race
from rlplace.plan.parse import plan_from_dict
from rlplace.plan.plan import FORMAT, VERSION, PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.job.measure import PlanTimer
from rlplace.runtime.distributed_text import broadcast_text


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
