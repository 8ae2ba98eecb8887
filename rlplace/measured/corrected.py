"""What a residual makes of a question: candidates as runs, and the plan that it finds quickest."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.measured.log import Run
from rlplace.measured.pool import Said, candidates, features, fullest
from rlplace.plan.plan import PlacementPlan
from rlplace.strategy.drafts import Draft, draft_of_strategy
from rlplace.strategy.plan import prediction
from rlplace.strategy.tries import Question

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlplace.measured.residual import Residual

CALLS, COUNT = 400, 12
"""Evaluations of the search for what may be quicker than the cost model says, and strategies of its answer."""

INTERVAL = 1.645
"""Standard deviations on either side of an interval that holds 90 %."""


def run_of(draft: Draft, said: Said, names: Sequence[str], cluster: Cluster, **more: Any) -> Run:
    """A run that has not begun.

    Args:
        draft: The strategy.
        said: What the cost model says of it.
        names: Of the blocks.
        cluster: Its devices.
        **more: Further fields of `rlplace.measured.log.Run`.
    """
    step_s = float(said.step_time_s or 0.0)
    fields: dict[str, Any] = {"question": "", "site": "", "expected_s": step_s, "fits": 1.0, **more}
    return Run(
        strategy=draft.strategy(names).to_dict(),
        kinds=tuple(kind.name for kind in cluster.kinds),
        hosts=cluster.hosts,
        features=tuple(features(draft, said).tolist()),
        predicted_s=step_s,
        predicted_share=fullest(said, cluster),
        **fields,
    )


def corrected(question: Question, plan: PlacementPlan, residual: Residual, name: str = "default") -> PlacementPlan:
    """The strategy that is quickest once a residual has corrected all, with both figures.

    On a cluster far from all that the residual has seen (`Residual.strange`) the planner's own answer stays. What it found is
    ``predicted.extra["residual"]``: its name, ``step_time_s``, the interval ``low_s`` to ``high_s`` that holds 90 % of such
    steps, and ``strange``, why it should not be relied on, or None.

    Args:
        question: What was asked.
        plan: The planner's answer.
        residual: What corrects.
        name: Of the residual, for those who read the plan.
    """
    assert plan.strategy is not None
    own = draft_of_strategy(plan.strategy, question.costs.names)
    strange = residual.strange([kind.name for kind in question.cluster.kinds])
    drafts = [own] if strange else list(dict.fromkeys([own, *candidates(question, CALLS, COUNT)]))
    found = [question.scores.evaluate(draft) for draft in drafts[1:]]
    said: list[Said] = [plan.predicted, *found]
    names, machine = question.costs.names, question.cluster
    mean, spread = residual.of([run_of(draft, one, names, machine) for draft, one in zip(drafts, said, strict=True)])
    step_s = np.array([float(one.step_time_s or math.inf) for one in said]) * np.exp(mean)
    chosen = int(np.argmin(np.where([bool(one.feasible) for one in said], step_s, np.inf)))
    about = {
        "name": name,
        "step_time_s": float(step_s[chosen]),
        "low_s": float(step_s[chosen] * math.exp(-INTERVAL * spread[chosen])),
        "high_s": float(step_s[chosen] * math.exp(INTERVAL * spread[chosen])),
        "strange": strange,
    }
    predicted = plan.predicted
    if chosen:
        told = prediction(found[chosen - 1], question.batch)
        predicted = told.told(strategies=predicted.strategies, search_calls=predicted.search_calls, extra=predicted.extra)
    return dataclasses.replace(
        plan,
        strategy=drafts[chosen].strategy(question.costs.names),
        predicted=predicted.told(extra={**predicted.extra, "residual": about}),
    )
