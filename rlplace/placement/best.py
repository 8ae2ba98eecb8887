"""The floor: all one-shot planners with the shared memory repair, no search; the best plan wins.

Every other planner is compared with this. Each one-shot planner yields a few candidates (numbers of devices,
orders, weights); see their modules. The result is the minimum over what each of them would return by itself, so `best` is never
worse than any of them. Without a time limit it is deterministic and does not depend on the seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from importlib import import_module

from rlplace.placement import ONE_SHOT, PLANNERS
from rlplace.placement.common.evaluate import Answer, Deadline, Evaluator, uncounted
from rlplace.placement.common.floor import REPAIRS, best_of, finish
from rlplace.placement.common.shortage import check_possible
from rlplace.placement.published.compiler.partition import warm_up as warm_up_partitions
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem


def best(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None) -> PlacementPlan:
    """The best plan of all one-shot planners; see the module docstring."""
    check_possible(problem)
    warm_up()
    answer = best_answer(problem, Evaluator(problem), Deadline(time_limit_s))
    return finish(problem, answer, planner="best", seed=seed)


@cache
def warm_up() -> None:
    """Compiles, or loads from the cache, what the one-shot planners run, so that time limits do not pay for it."""
    problem = random_problem(1, 8, 3, memory_factor=1.0, unlike=True, hosts=2)  # tight enough for repairs
    with uncounted():
        for _ in floor_answers(problem, Evaluator(problem), Deadline(None)):
            pass
    warm_up_partitions(problem)


def best_answer(problem: Problem, evaluator: Evaluator, deadline: Deadline) -> Answer | None:
    """The result of `best` as an answer; the infeasible one nearest to fitting when nothing fits."""
    answers = [answer for _, answer in floor_answers(problem, evaluator, deadline)]
    return min(answers, key=lambda a: a.score.objective_s, default=None)


def floor_answers(problem: Problem, evaluator: Evaluator, deadline: Deadline) -> Iterator[tuple[str, Answer]]:
    """The name and best answer of every one-shot planner, feasible or not; stops when the deadline has passed.

    Once a quarter of the time is gone, plans that do not fit and are slower than one that is known are not repaired.

    The problem must have passed `rlplace.placement.common.shortage.check_possible`.
    """
    known_s, whole_s = math.inf, deadline.left_s()
    for name in ONE_SHOT:
        if name == "compiler" and known_s < math.inf and deadline.left_s() < 0.5 * whole_s:
            return  # its first partition takes up to as long as all others together
        module = import_module(PLANNERS[name].split(":")[0])
        repairs = getattr(module, "REPAIRS", REPAIRS)
        slower_s = known_s if deadline.left_s() < 0.75 * whole_s else math.inf
        answer = best_of(problem, module.candidates(problem, 0), evaluator, deadline, repairs=repairs, known_s=slower_s)
        if answer is not None:
            yield name, answer
            known_s = min(known_s, answer.score.step_time_s) if answer.score.feasible else known_s
        if deadline.passed():
            return
