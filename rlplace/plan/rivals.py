"""The rivals of a plan's strategy, read from its prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rlplace.plan.prediction import Prediction
from rlplace.records import Whole, build
from rlplace.text import bytes_text

_Positive = Annotated[float, Meta(gt=0.0, lt=1e18)]


class Rival(msgspec.Struct, frozen=True):
    """Another strategy for the same step.

    Attributes:
        kind: Name of its kind, for display.
        words: The strategy in one line; "" where there is none.
        devices: Number of devices that it uses.
        step_time_s: Step time; None where it does not fit or cannot run.
        samples_per_s: Samples per second; None where it does not fit or cannot run.
        over_bytes: Bytes over capacity, summed over its devices.
        uniform: Whether it is the best uniform one.
        reason: Why it was not evaluated.
        strategy: The strategy as plain data, as in files.
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

    @property
    def remark(self) -> str:
        """The strategy in one line, or why there is no step time."""
        if self.step_time_s is not None:
            return self.words
        return self.reason or f"{too_large(self.over_bytes, self.devices)}: {self.words}"


class BatchTried(msgspec.Struct, frozen=True):
    """The best strategy of a batch, where the batch was chosen, too.

    Attributes:
        batch: Samples a step.
        epochs: Epochs to the target.
        target_s: Proportional to the time to the target; None where nothing fits.
        step_time_s: Step time; None where nothing fits.
        words: The strategy.
        reason: Why there is none.
    """

    batch: Whole
    epochs: _Positive
    target_s: _Positive | None
    step_time_s: _Positive | None
    words: str
    reason: str | None


def too_large(over_bytes: float, devices: int) -> str:
    """Bytes over capacity that are a sum over so many devices, for people."""
    return f"too large by {bytes_text(over_bytes)}" + (f" on {devices} devices together" if devices > 1 else "")


def rivals_of(predicted: Prediction) -> tuple[Rival, ...]:
    """The strategy itself first, then its rivals: the next best by step time, then the best of each kind.

    Raises:
        InputError: The prediction has them in another form than planning writes.
    """
    return build(tuple[Rival, ...], list(predicted.strategies), "plan: predicted.strategies")


def quickest_of(rivals: Sequence[Rival]) -> Rival:
    """The quickest of a strategy and its rivals: another than the strategy where that is simpler and about as quick."""
    return min(rivals, key=lambda rival: math.inf if rival.step_time_s is None else rival.step_time_s)


def batches_of(predicted: Prediction) -> tuple[BatchTried, ...]:
    """The batches that were compared; none where the batch was given. Raises as `rivals_of` does."""
    return build(tuple[BatchTried, ...], predicted.extra.get("batches", []), "plan: predicted.batches")
