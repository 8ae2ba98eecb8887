"""What a campaign may cost, and what it has cost."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.errors import InputError


class BudgetSpent(Exception):
    """The campaign may measure nothing more."""


@dataclass(frozen=True)
class Budget:
    """What a campaign may cost; None: no limit.

    Attributes:
        plans: Plans measured, failures included; timing a known plan again is not counted.
        steps: Timed steps, repeated timings included.
        minutes: Time spent measuring: set-up and steps, as the trials say; for a plan that failed, all the time that it took.
    """

    plans: int | None = 60
    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("plans", "steps", "minutes"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise InputError(f"budget: {name} must be above 0, found {value!r}")


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
