"""What a campaign may cost, and what it has cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rlplace.records import Count, Record, check_record


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
