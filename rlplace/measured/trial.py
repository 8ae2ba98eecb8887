"""`Trial`: one attempt to run a plan on a real cluster, whether it worked or not."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rlplace.cost.timings import Mode, PlaceTiming
from rlplace.limits import DEVICES
from rlplace.records import Count, Record, check_record

Status = Literal["done", "dropped", "out_of_memory", "crashed", "refused", "running"]
"""How a trial ended. `dropped`: it was clear after few steps that the plan is slower than the best one, so its times are few.
`refused`: no engine runs the plan. `running`: it has not ended, or the job ended with it."""

FAILED = ("out_of_memory", "crashed", "refused")

MAX_GROUPS = 1 << 20
MAX_STEPS = 1 << 20
MAX_REASON = 4000
MAX_NAME = 1000

Fingerprint = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
_Seconds = Annotated[float, Meta(ge=0.0, lt=1e18)]
_Step = Annotated[float, Meta(gt=0.0, lt=1e18)]


class Trial(Record, frozen=True):
    """The timed steps of one plan.

    Attributes:
        problem: Fingerprint of the problem that the plan was made for.
        site: Fingerprint of the cluster and its software, see `rlplace.measured.site.Site`; empty where it was not described.
        device_of_group: The plan, a device number per group.
        status: How it ended.
        step_s: Seconds of every timed step, the slowest process of each; empty when it failed.
        places: What every process did in the median step.
        predicted_s: Simulated step time of the problem as it was priced; None where unknown.
        engine: What ran it.
        mode: ``"computed"`` or ``"replayed"``, see `rlplace.cost.timings`.
        setup_s: From the plan to the first step.
        began_at: Seconds since 1970.
        reason: Why it failed, one line.
        run: Name of the tuning run that made it, for people.
        anchor: A repeated run of a known plan, which shows whether the cluster itself has changed.
    """

    problem: Fingerprint
    site: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    device_of_group: Annotated[tuple[Annotated[int, Meta(ge=0, lt=DEVICES)], ...], Meta(max_length=MAX_GROUPS)]
    status: Status
    step_s: Annotated[tuple[_Step, ...], Meta(max_length=MAX_STEPS)] = ()
    places: Annotated[tuple[PlaceTiming, ...], Meta(max_length=DEVICES)] = ()
    predicted_s: _Seconds | None = None
    engine: Name = ""
    mode: Mode = "computed"
    setup_s: _Seconds = 0.0
    began_at: _Seconds = 0.0
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    run: Name = ""
    anchor: bool = False

    @property
    def timed(self) -> bool:
        """Whether there are step times."""
        return bool(self.step_s)

    @property
    def median_s(self) -> float:
        """Median step time; inf when the plan failed."""
        return statistics.median(self.step_s) if self.step_s else math.inf


class BudgetSpent(Exception):
    """The campaign may measure nothing more."""


class Budget(Record, frozen=True):
    """What a campaign may cost; None: no limit.

    Attributes:
        plans: Plans measured, failures included; timing a known plan again is not counted.
        steps: Timed steps, repeated timings included.
        minutes: Time spent measuring: set-up and steps, as the trials say; for a plan that failed, all the time that it took.
    """

    plans: Count | None = 60
    steps: Count | None = None
    minutes: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        check_record(self, "budget")


@dataclass(frozen=True)
class Spent:
    """What a campaign has cost so far; fields as in `Budget`."""

    plans: int = 0
    steps: int = 0
    minutes: float = 0.0

    def share(self, budget: Budget) -> float:
        """The share that is spent of the limit that is nearest, from 0 to 1."""
        pairs = ((getattr(self, name), getattr(budget, name)) for name in ("plans", "steps", "minutes"))
        return min(1.0, max((done / limit for done, limit in pairs if limit is not None), default=0.0))
