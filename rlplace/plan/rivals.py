"""What a plan with a strategy says of the strategies beside it, read from its prediction."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rlplace.plan.prediction import Prediction
from rlplace.records import Whole, build

_Positive = Annotated[float, Meta(gt=0.0, lt=1e18)]


class Rival(msgspec.Struct, frozen=True):
    """Another strategy for the same step.

    Attributes:
        kind: What people call it.
        words: The strategy in one line; "" where there is none.
        devices: That it uses.
        step_time_s: None where it does not fit or cannot run.
        samples_per_s: Likewise.
        over_bytes: Bytes over capacity.
        uniform: It is the best uniform one.
        reason: Why it was not evaluated.
        strategy: As in files.
    """

    kind: str
    words: str
    devices: Whole
    step_time_s: _Positive | None
    samples_per_s: _Positive | None
    over_bytes: Whole = 0
    uniform: bool = False
    reason: str | None = None
    strategy: dict[str, Any] | None = None


class BatchTried(msgspec.Struct, frozen=True):
    """What the best strategy of a batch takes, where the batch was chosen, too.

    Attributes:
        batch: Samples a step.
        epochs: To the target.
        target_s: Proportional to the time to the target; None where nothing fits.
        step_time_s: Likewise.
        words: The strategy.
        reason: Why there is none.
    """

    batch: Whole
    epochs: _Positive
    target_s: _Positive | None
    step_time_s: _Positive | None
    words: str
    reason: str | None


def rivals_of(predicted: Prediction) -> tuple[Rival, ...]:
    """The strategy itself and its rivals, the best first.

    Raises:
        InputError: They are not as planning writes them.
    """
    return build(tuple[Rival, ...], list(predicted.strategies), "plan: predicted.strategies")


def batches_of(predicted: Prediction) -> tuple[BatchTried, ...]:
    """The batches that were compared; none where the batch was given. Raises as `rivals_of` does."""
    return build(tuple[BatchTried, ...], predicted.extra.get("batches", []), "plan: predicted.batches")
