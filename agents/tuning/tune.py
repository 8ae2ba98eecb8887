"""The loop of fine-tuning on a live cluster: measure, calibrate, learn, propose, measure.

1. A few plans that are good by what is known, and that use every device and link, are measured.
2. The cost model is corrected to everything that was measured (`rlplace.measured.calibrate`).
3. A proposer finds a plan in the corrected simulator that has not been measured; it is measured. Back to 2.
4. When the budget is spent, the few fastest plans are timed again until one of them stands out.

The loop knows nothing of how plans are proposed, so that agents and searches can be compared in it at equal terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.agents.tuning.belief import Belief, Proposer, believe
from rlplace.agents.tuning.design import roomiest
from rlplace.errors import InfeasibleError
from rlplace.measured.budget import BudgetSpent
from rlplace.measured.campaign import Campaign
from rlplace.measured.race import lower_bound, upper_bound
from rlplace.measured.trial import Trial

CALLS = 2048
"""Simulations that a proposal may cost."""

_FINALISTS = 3
_FINALS = 2  # times that each finalist is timed again at most


@dataclass(frozen=True, eq=False)
class Tuned:
    """What a campaign has found.

    Attributes:
        best: The fastest plan.
        seconds: Its step time, freed of drift.
        belief: The last one.
        proposed: How many plans were proposed after the first ones.
        finished: Whether the budget was spent; False when nothing was left to propose.
    """

    best: Trial
    seconds: float
    belief: Belief
    proposed: int
    finished: bool


def tune(
    campaign: Campaign,
    proposer: Proposer,
    first: Sequence[NDArray[np.int32]],
    *,
    calls: int = CALLS,
) -> Tuned:
    """Spends a campaign's budget.

    Args:
        campaign: Trials that it knows already are not made again.
        proposer: Says what to measure next.
        first: Plans to measure first.
        calls: Simulations that a proposal may cost.

    Raises:
        InfeasibleError: No plan that was measured has worked.
    """
    finished, number = False, 0
    belief: Belief | None = None
    try:
        for plan in first:
            campaign.measure(plan)
        while not (finished := campaign.share >= 1.0):
            belief = believe(campaign, belief)
            if belief is None:  # nothing to learn from yet
                plan_next = roomiest(campaign.problem, campaign.known_plans, execution=campaign.execution, seed=number)
            else:
                plan_next = proposer.propose(belief, calls=calls, number=number)
            if plan_next is None:
                break
            campaign.measure(plan_next)
            number += 1
    except BudgetSpent:
        finished = True
    _finals(campaign)
    best = campaign.best()
    belief = believe(campaign, belief)
    if best is None or belief is None:
        raise _nothing_worked(campaign)
    return Tuned(best, campaign.seconds(best), belief, number, finished)


def _finals(campaign: Campaign) -> None:
    """The fastest of many noisy times is too good to be true: times the few fastest again while they are close."""
    for _ in range(_FINALS):
        done = {t.device_of_group: t for t in campaign.trials if t.status == "done" and not t.anchor}
        ranked = sorted(done.values(), key=campaign.seconds)[:_FINALISTS]
        close = [trial for trial in ranked[1:] if _overlap(campaign, ranked[0], trial)]
        if not close:
            return
        for trial in [ranked[0], *close]:
            campaign.time_again(trial)


def _overlap(campaign: Campaign, first: Trial, second: Trial) -> bool:
    noise = campaign.noise
    count = [sum(len(t.step_s) for t in campaign.trials if t.device_of_group == own.device_of_group) for own in (first, second)]
    high = upper_bound([campaign.seconds(first)] * count[0], noise)
    return lower_bound([campaign.seconds(second)] * count[1], noise) < high


def _nothing_worked(campaign: Campaign) -> InfeasibleError:
    reasons = [trial.reason for trial in campaign.trials if trial.reason]
    why = f"; the last one: {reasons[-1]}" if reasons else ""
    return InfeasibleError(f"finetune: none of {len(campaign.trials)} measured plans worked{why}")
