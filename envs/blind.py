"""The view of a plan that cannot complete: no timeline says where time is lost, only what lies where is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.guide import analysis
from rlplace.envs.guide.guide import Guide


def blind_view(guide: Guide, plan: NDArray[np.int32]) -> None:
    """Fills the guide's view with loads and provable bytes; every group counts as tight and nothing waits.

    The unit of time, which is the step time elsewhere, is the instance's lower reference.

    Args:
        guide: Of the instance.
        plan: int32 [G].
    """
    facts, view = guide.facts, guide.view
    devices, groups = len(view.load), np.arange(len(plan))
    view.load[:] = np.bincount(plan, weights=facts.group_s[groups, plan], minlength=devices)
    view.pinned[:] = view.peak[:] = np.bincount(plan, weights=facts.pinned, minlength=devices)
    view.tightness[:] = 1.0
    view.gap[:] = view.margin[:] = np.inf  # no transfer is known to be urgent
    for unknown in (
        view.channel, view.idle, view.clash, view.crowd, view.strict_clash, view.strict_crowd, view.urgent, view.queue, view.slack, view.wait, view.chain, view.saved, view.blocked, view.sent, view.hurried,
        view.total,
    ):  # fmt: skip
        unknown[:] = 0.0
    view.total[analysis.STEP] = guide.instance.reference_step_time_s
    view.total[analysis.WORK], view.total[analysis.BUSIEST] = view.load.sum(), view.load.max()
