"""The view of a plan that cannot complete: no timeline says where time is lost, only what lies where is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.guide import view as view_of
from rlplace.envs.guide.guide import Guide


def blind_view(guide: Guide, plan: NDArray[np.int32]) -> None:
    """Fills the guide's view with loads and provable bytes; every group counts as tight and nothing waits.

    The unit of time, which is the step time elsewhere, is the instance's lower reference.

    Args:
        guide: Its view is filled.
        plan: int32 [G].
    """
    facts, view = guide.facts, guide.view
    devices, groups = len(view.load), np.arange(len(plan))
    for name, unknown in view._asdict().items():
        if name != "arrival":
            unknown[:] = 0.0
    view.load[:] = np.bincount(plan, weights=facts.group_s[groups, plan], minlength=devices)
    view.pinned[:] = view.peak[:] = np.bincount(plan, weights=facts.pinned, minlength=devices)
    view.tightness[:] = view.part[:] = 1.0
    view.gap[:] = view.margin[:] = np.inf  # no transfer is known to be urgent
    view.total[view_of.STEP] = guide.instance.reference_step_time_s
    view.total[view_of.WORK], view.total[view_of.BUSIEST] = view.load.sum(), view.load.max()
