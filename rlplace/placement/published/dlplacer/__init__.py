"""DLPlacer: an exact placement program on a coarsened graph.

Problem: step time of one training step whose ops are spread over the devices of a replica (the model-parallel half of hybrid
parallelism), with memory limits, groups that stay together and links that
carry one transfer at a time.

Paper: Pal, Ebrahimi, Zulfiqar, Fu, Zhang, Migacz, Nellans, Gupta, "Optimizing multi-GPU parallelization strategies for deep
learning training", IEEE Micro 39(5), 2019 (arXiv 1907.13257). The paper's are hybrid parallelism and an exact placement of part
of the model's graph on a hardware graph. Its program is not published in full; the one here is a reconstruction: placement,
start times, one op at a time on a device, transfers that overlap with compute, memory, link capacity, symmetry breaking. The
paper uses an integer linear program; ours goes to CP-SAT, which has intervals, and is an integer program all the same.

Steps: the graph is shrunk to at most `groups` nodes (`coarsen`); the program of the coarse problem is solved under a limit,
with the better of `best` on the coarse problem and `best` on the problem itself as the hint; its solutions go back to the
problem's groups, are simulated and repaired like any candidate. The answer of `best` is a candidate too, so the plan is never
worse. ``plan.predicted.proof`` holds what the solver proved of the coarse program: it says nothing about plans that split a
node, and the executor's step time may differ.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from rlplace.budget import Budget
from rlplace.errors import whole_number
from rlplace.placement.common.evaluate import PlanEvaluator, ScoredAssignment
from rlplace.placement.common.floor import best_of, finish
from rlplace.placement.common.shortage import check_possible
from rlplace.placement.published.dlplacer.coarsen import coarsen, contract_groups
from rlplace.placement.published.dlplacer.constraints import limit_static
from rlplace.placement.published.dlplacer.instance import TickedProblem, make_instance
from rlplace.placement.published.dlplacer.program import PlacementProgram, solver_library
from rlplace.placement.published.dlplacer.solve import Outcome, realise, solve_program
from rlplace.placement.search import best_answer, warm_up
from rlplace.plan import PlacementPlan, make_plan
from rlplace.problem import Problem
from rlplace.simulator import Timeline

GROUPS = 64
"""Nodes of the coarse graph."""

EFFORT = 10.0
"""Default limit in the solver's deterministic seconds."""

MAX_CARRIED = 4000
"""Possible transfers of all tensors up to which the program keeps transfers apart on channels."""

_CANDIDATES = 8
"""Solutions that are simulated, the best ones."""

_KEPT_S = 0.15
"""Share of the time limit that is reserved for the steps after the solver."""


def dlplacer(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    groups: int = GROUPS,
    effort: float = EFFORT,
) -> PlacementPlan:
    """Returns the best plan that the coarse program leads to; see the module docstring.

    Args:
        problem: The problem.
        seed: The solver's random seed.
        time_limit_s: Seconds, those of `best` included; without it the result depends on the problem and the seed alone.
        groups: Nodes of the coarse graph; problems with fewer groups are not coarsened.
        effort: Limit in the solver's deterministic seconds.

    Raises:
        InfeasibleError: Neither `best` nor the program led to a plan that fits.
        MissingError: OR-tools is not installed.
    """
    whole_number(groups, "dlplacer: groups", 1)
    solver_library()
    check_possible(problem)
    warm_up()
    evaluator = PlanEvaluator(problem, Budget(seconds=time_limit_s))
    budget = evaluator.budget
    baseline = best_answer(evaluator)
    node_of_group = coarsen(problem, groups)
    coarse, part = contract_groups(problem, node_of_group)
    hint = _hint(coarse, node_of_group, baseline, budget)
    left_s = budget.left_s()
    solver_s = left_s if math.isinf(left_s) else max(0.0, left_s - _KEPT_S * (time_limit_s or 0.0))
    outcome, program = _solve(coarse, hint, seed=seed, effort=effort, time_limit_s=solver_s)
    known = [] if baseline is None else [baseline.devices]
    solved = [solution.device_of_group[node_of_group] for solution in outcome.solutions[:_CANDIDATES]]
    answer = best_of(evaluator, [*known, *solved])
    facts = _proof(outcome, coarse, program.instance, contention=bool(program.carried))
    best = None
    for solution, devices in zip(outcome.solutions, solved, strict=False):
        for way in realise(evaluator, program.instance, solution, devices, part):
            best = way if best is None or way.rank < best.rank else best
        if budget.passed():
            break
    if best is None or not best.line.feasible or (answer is not None and (False, answer.score.objective_s) <= best.rank):
        plan = finish(problem, answer, planner="dlplacer", seed=seed)
        return plan.with_predicted(plan.predicted.replace(proof=facts))
    predicted = best.line.predicted(problem).replace(proof=facts)
    return make_plan(problem, best.devices, planner="dlplacer", seed=seed, predicted=predicted, **best.fields)


def _hint(coarse: Problem, node_of_group: Any, baseline: ScoredAssignment | None, budget: Budget) -> Timeline | None:
    """Returns the best simulated step of the coarse problem that is known without the solver."""
    evaluator = PlanEvaluator(coarse, budget)
    answers = [best_answer(evaluator)]
    if baseline is not None:
        nodes = coarse.num_groups
        votes = np.zeros((nodes, coarse.num_devices), dtype=np.int64)
        np.add.at(votes, (node_of_group, baseline.devices), 1)
        votes[~coarse.group_allowed] = -1
        answers.append(evaluator.answer(votes.argmax(axis=1).astype(np.int32)))
    known = [a for a in answers if a is not None and a.score.feasible]
    if not known:
        return None
    return evaluator.timeline(min(known, key=lambda a: a.score.objective_s).devices)


def _solve(
    coarse: Problem, hint: Timeline | None, *, seed: int, effort: float, time_limit_s: float
) -> tuple[Outcome, PlacementProgram]:
    """Solves the coarse program; when its estimate of memory leaves no solution, without it: the repair comes later."""
    instance = make_instance(coarse, None if hint is None else hint.step_time_s)
    allowed, ways = coarse.group_allowed.sum(axis=1), 0
    for value, home in enumerate(coarse.tensor_group.tolist()):
        if any(coarse.op_group[task] != home for task in instance.readers[value]):
            ways += int(allowed[home]) * (coarse.num_devices - 1)
    contention = ways <= MAX_CARRIED
    program = PlacementProgram(instance, contention=contention)
    limit_static(program)
    outcome = solve_program(program, hint=hint, seed=seed, effort=effort, time_limit_s=time_limit_s)
    if outcome.status == "infeasible":
        program = PlacementProgram(instance, contention=contention)
        outcome = solve_program(program, hint=hint, seed=seed, effort=effort, time_limit_s=time_limit_s)
        outcome = replace(outcome, status=f"{outcome.status} without memory" if outcome.solutions else outcome.status)
    return outcome, program


def _proof(outcome: Outcome, coarse: Problem, instance: TickedProblem, *, contention: bool) -> dict[str, Any]:
    finite = math.isfinite(outcome.bound_s)
    return {
        "program": "coarse",
        "status": outcome.status,
        "objective_s": outcome.objective_s,
        "lower_bound_s": outcome.bound_s if finite else None,
        "gap": outcome.gap,
        "nodes": coarse.num_groups,
        "ops": coarse.num_ops,
        "contention": contention,
        "exact_times": instance.ticks.exact,
    }
