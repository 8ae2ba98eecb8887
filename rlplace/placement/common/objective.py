"""The one objective of plans, by which searches, repair and rewards compare them, and the slope that searches walk on.

A plan that fits beats every plan that does not. Among plans that fit the faster one is better, among others the one that
is short of less memory. A step that cannot complete is worst. Compiled loops compile these functions too.
"""

from __future__ import annotations

UNFIT_S = 1e12
"""Seconds that stand for the step of a plan that does not fit: longer than any step."""

_SLOPE, _BASE = 3.0, 0.02


def objective_s(step_s: float, overflow: float) -> float:
    """The objective: the step time of a plan that fits; for any other plan `UNFIT_S` times 1 + overflow.

    Args:
        step_s: Step time; inf when the step cannot complete.
        overflow: Bytes over the limit relative to the device's memory, summed over devices.
    """
    if overflow == 0.0 or step_s > UNFIT_S:
        return step_s
    return UNFIT_S * (1.0 + overflow)


def descent_s(step_s: float, overflow: float) -> float:
    """The value by which a search weighs its next move: step time, raised where memory overflows.

    The way to a better plan that fits often leads through plans that do not, which the objective would bar. The answer of a
    search is chosen by the objective.

    Args:
        step_s: Step time; inf when the step cannot complete.
        overflow: Bytes over the limit relative to the device's memory, summed over devices.
    """
    if overflow == 0.0:
        return step_s
    return step_s * (1.0 + _SLOPE * (overflow + _BASE))
