"""What fills devices under a strategy, as plans list it: the entries of ``predicted.memory``."""

from __future__ import annotations

import msgspec

from rlplace.plan.prediction import Prediction
from rlplace.records import Whole, build


class HeldMemory(msgspec.Struct, frozen=True):
    """Memory of devices that hold the same, when they hold the most.

    Attributes:
        devices: Their names.
        parts: Bytes by kind (`rlplace.strategy.search.memory_parts.PARTS`); they add up to `total_bytes`.
        total_bytes: The peak.
        capacity_bytes: Memory of one of them; None where nobody says.
        op_by_op: Whether the moment of the peak is known op by op; else activations are all that passes hold.
    """

    devices: tuple[str, ...]
    parts: dict[str, int]
    total_bytes: Whole
    capacity_bytes: Whole | None
    op_by_op: bool


def memory_of(predicted: Prediction) -> tuple[HeldMemory, ...]:
    """The entries of a strategy's prediction.

    Raises:
        InputError: They have another form than planning writes.
    """
    return build(tuple[HeldMemory, ...], list(predicted.memory), "plan: predicted.memory")
