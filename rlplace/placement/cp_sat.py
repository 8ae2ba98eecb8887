"""Exact placement of small problems with a proof: the placement program, solved by CP-SAT.

Problem: step time of the executor, memory included, over all assignments and all orders of ops on devices. The program
(`rlplace.placement.published.dlplacer.program`) has every simulated step among its solutions, so what the solver proves is a
lower bound for every plan, whatever its order. The floor, `best`, is the hint. The best solutions are each simulated three
ways: with default priorities, with the solver's starts as priorities, and with its order of ops on every device; the fastest is
the plan. ``plan.predicted.proof`` says what is known: `lower_bound_s`, the `gap` of the plan's step time to it, `status`
(``"optimal"`` when there is no gap), and the program's own status and makespan.

Solver: Perron, Didier, "CP-SAT", the constraint solver of OR-tools (the extra `exact`). The program is the one of `dlplacer`;
see there for the paper.

The program lets devices and links wait although something is ready, for example to let another tensor go first; the executor
does not. Where its optimum cannot be run for that reason, it is solved again with what the executor does
(`rlplace.placement.published.dlplacer.constraints`). A gap can remain where the solver runs out of effort, where the second
program would be
too large, and where events of one instant decide. Times without a common unit are rounded down to 4e-9 of the step.
"""

from __future__ import annotations

import math
from typing import Any

from rlplace.budget import Budget
from rlplace.errors import InfeasibleError, InputError
from rlplace.placement.common.bounds import lower_bounds
from rlplace.placement.common.evaluate import PlanEvaluator
from rlplace.placement.common.shortage import check_possible, raise_infeasible
from rlplace.placement.published.dlplacer.constraints import keep_request_order, limit_timeline, start_at_once
from rlplace.placement.published.dlplacer.instance import TickedProblem, make_instance
from rlplace.placement.published.dlplacer.program import PlacementProgram, solver_library
from rlplace.placement.published.dlplacer.solve import EFFORT, Outcome, Realised, realise, solve_program
from rlplace.placement.search import best_answer, warm_up
from rlplace.plan import PlacementPlan, make_plan
from rlplace.problem import Problem

MAX_TASKS = 200
"""Ops that the planner accepts by default."""

OPTIMAL_GAP = 1e-6
"""Relative gap below which a plan counts as proven optimal: rounding to ticks costs less."""

_REALISED = 12
"""Improving solutions that are simulated, the best ones."""


def cp_sat(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    effort: float = EFFORT,
    max_tasks: int = MAX_TASKS,
) -> PlacementPlan:
    """Returns the plan of smallest step time, with a proof or the gap that is left.

    Args:
        problem: The problem.
        seed: The seed of the solver.
        time_limit_s: Seconds, floor included; without it the result depends on the problem and the seed alone.
        effort: Limit in the solver's deterministic seconds.
        max_tasks: Larger problems are refused.

    Raises:
        InputError: The problem is too large.
        InfeasibleError: No plan fits, which may be proven, or none was found.
        MissingError: OR-tools is not installed.
    """
    count = problem.num_ops
    if count > max_tasks:
        raise InputError(
            f"cp_sat: the problem has {count} ops, the limit is {max_tasks}; use planner 'dlplacer', which coarsens first, "
            f"coarser groups, or max_tasks={count} and patience"
        )
    solver_library()
    check_possible(problem)
    warm_up()
    evaluator = PlanEvaluator(problem, Budget(seconds=time_limit_s))
    floor = best_answer(evaluator)
    line = None if floor is None else evaluator.timeline(floor.devices)
    hint = line if line is not None and line.feasible else None
    instance = make_instance(problem, None if hint is None else hint.step_time_s)
    program = PlacementProgram(instance, contention=True)
    keep_request_order(program)
    limit_timeline(program)
    ways = [] if hint is None or floor is None else [Realised(hint, floor.devices, {})]
    outcome = solve_program(program, hint=hint, seed=seed, effort=effort, time_limit_s=evaluator.budget.left_s())
    if outcome.status == "infeasible" and hint is None:
        raise InfeasibleError(
            "cp_sat proved that no plan fits: every assignment and order exceeds some device's memory or needs a missing link; "
            "use finer groups, larger devices, or a smaller batch"
        )
    bound_s = lower_bounds(problem).step_time_s
    if math.isfinite(outcome.bound_s):  # the hint is a solution: a program without one would prove nothing about it
        bound_s = max(bound_s, outcome.bound_s)
    ways += _realise_all(instance, evaluator, outcome)
    best = min(ways, key=lambda way: way.rank, default=None)
    # The program is solved, but the executor cannot follow it: solve again with what the executor adds.
    if best is not None and best.line.feasible and outcome.status == "optimal" and not problem.collectives:
        if best.rank > (False, bound_s * (1 + OPTIMAL_GAP)) and start_at_once(program):
            outcome = solve_program(program, hint=best.line, seed=seed, effort=effort, time_limit_s=evaluator.budget.left_s())
            bound_s = max(bound_s, outcome.bound_s if math.isfinite(outcome.bound_s) else 0.0)
            best = min([best, *_realise_all(instance, evaluator, outcome)], key=lambda way: way.rank)
    if best is None or not best.line.feasible:
        raise_infeasible(problem, line, planner="cp_sat")
    assert best.line.step_time_s is not None
    facts = proof(outcome, bound_s, best.line.step_time_s, instance)
    predicted = best.line.predicted(problem).replace(proof=facts)
    return make_plan(problem, best.devices, planner="cp_sat", seed=seed, predicted=predicted, **best.fields)


def proof(outcome: Outcome, bound_s: float, step_time_s: float, instance: TickedProblem) -> dict[str, Any]:
    """Returns the proof about a plan of this problem, as plain data."""
    bound = min(bound_s, step_time_s)
    gap = 1.0 - bound / step_time_s if step_time_s > 0 else 0.0
    return {
        "status": "optimal" if gap <= OPTIMAL_GAP else "feasible",
        "lower_bound_s": bound,
        "gap": gap if gap > OPTIMAL_GAP else 0.0,
        "program_status": outcome.status,
        "program_step_time_s": outcome.objective_s,
        "exact_times": instance.ticks.exact,
    }


def _realise_all(instance: TickedProblem, evaluator: PlanEvaluator, outcome: Outcome) -> list[Realised]:
    """Returns the ways to run the solver's solutions: best solutions first, and for each the simplest way first."""
    ways: list[Realised] = []
    for solution in outcome.solutions[:_REALISED]:
        ways += realise(evaluator, instance, solution, solution.device_of_group)
        if min(way.rank for way in ways) <= (False, outcome.bound_s * (1 + OPTIMAL_GAP)):
            break
    return ways
