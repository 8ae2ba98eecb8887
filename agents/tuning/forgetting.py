"""What an agent has unlearned: the zero-shot table of the test split before and after fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.agents.cases import Case
from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.planner import Agent
from rlplace.errors import InfeasibleError
from rlplace.planners import get_planner

CALLS = 256


@dataclass(frozen=True)
class Skills:
    """Two agents on cases that neither has seen.

    Attributes:
        cases: With a plan that fits.
        before: Geometric mean of step time over that of ``best``, `calls` simulator calls after it.
        after: The same of the fine-tuned agent.
        worse: Cases on which the fine-tuned agent is at least 1 % slower.
        better: At least 1 % faster.
        worst: Largest ratio of its step time to that of the agent before.
        calls: Simulator calls.
    """

    cases: int
    before: float
    after: float
    worse: int
    better: int
    worst: float
    calls: int


def compare_skills(
    before: Checkpoint,
    after: Checkpoint,
    cases: Sequence[Case],
    *,
    calls: int = CALLS,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Skills:
    """Places every case with both agents, from the same floor and with the same calls.

    Args:
        before: The agent that was fine-tuned.
        after: What came of it.
        cases: Cases to place.
        calls: Simulator calls after the floor.
        seed: Of both searches.
        progress: Called with the number of cases done.
    """
    rows = []
    for done, case in enumerate(cases, 1):
        run = case.execution.arguments
        try:
            floor = get_planner("best")(case.problem, seed=seed, **run)
            plans = [
                Agent(agent).place(case.problem, calls=calls, start=floor.device_of_group, seed=seed, **run)
                for agent in (before, after)
            ]
        except InfeasibleError:
            progress(done)
            continue
        rows.append([plan.predicted.step_s / floor.predicted.step_s for plan in plans])
        progress(done)
    table = np.array(rows).reshape(-1, 2)
    ratio = table[:, 1] / table[:, 0]
    mean = np.exp(np.log(table).mean(axis=0)) if len(table) else np.array([np.nan, np.nan])
    return Skills(
        cases=len(table),
        before=float(mean[0]),
        after=float(mean[1]),
        worse=int((ratio > 1.01).sum()),
        better=int((ratio < 0.99).sum()),
        worst=float(ratio.max(initial=1.0)),
        calls=calls,
    )
