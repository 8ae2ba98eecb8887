"""Host time: a device op cannot start before the host has issued it.

The host walks the ops in execution order and needs an issue time for each; the device starts an op when it has been issued and
the one before has ended. An op is charged from the end of the one before to its own end, so that the charges of all ops add up
to the time of the step on one device: a launch-bound run of small ops costs what the host needs, and small ops behind a large
one cost only their device time, because the host ran ahead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fold_issue(device_s: NDArray[np.float64], issue_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Folds host issue times into op times.

    Args:
        device_s: [N] device time of every op in execution order, 0 for ops that launch nothing.
        issue_s: [N] host time to issue it.

    Returns:
        [N] seconds, at least `device_s`; they add up to the end of the last op, or of the host if that is later.
    """
    issued = np.cumsum(issue_s)
    work = np.cumsum(device_s)
    # The device ends op i at work[i] + max over j <= i of (issued[j] - work before j), the largest wait so far.
    waits = device_s > 0
    wait = np.maximum.accumulate(np.where(waits, issued - (work - device_s), 0.0))
    stall = np.diff(wait, prepend=0.0)
    # A view at the very end, or a step of views alone, still takes the host's time.
    if len(stall) and issued[-1] > work[-1] + wait[-1]:
        stall[-1] += issued[-1] - work[-1] - wait[-1]
    result: NDArray[np.float64] = device_s + np.maximum(stall, 0.0)
    return result
