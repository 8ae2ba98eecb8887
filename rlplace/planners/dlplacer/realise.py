"""From a solution of the program to a plan: the executor runs the assignment with the solver's order, or without it.

The solver also decides when things run. A plan can carry that as an order of ops on every device, which the executor follows to
the letter, or as priorities, which it prefers where ops compete; or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.common.evaluate import Assignment, Evaluator
from rlplace.planners.dlplacer.instance import Instance
from rlplace.planners.dlplacer.solve import Solution
from rlplace.problem import Problem
from rlplace.simulator import Timeline


@dataclass(frozen=True, eq=False)
class Realised:
    """A simulated way to run an assignment.

    Attributes:
        line: The simulated step.
        devices: int32 [G].
        fields: The plan's ``priority`` or ``order``, or empty.
    """

    line: Timeline
    devices: Assignment
    fields: dict[str, Any]

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: feasible before infeasible, then the step time."""
        step = self.line.step_time_s
        return not self.line.feasible, float("inf") if step is None else step


def realise(evaluator: Evaluator, devices: Assignment, start: NDArray[Any], order: list[list[int]]) -> Iterator[Realised]:
    """The ways to run an assignment, the plainest first: default priorities, the solver's starts as priorities, its order.

    Args:
        evaluator: Simulates and counts.
        devices: int32 [G].
        start: Number [N], start of each op in the solver's solution.
        order: The solver's order on every device.
    """
    ways: list[dict[str, Any]] = [{}, {"priority": priorities(evaluator.problem, start)}, {"order": order}]
    for fields in ways:
        yield Realised(evaluator.timeline(devices, **fields), devices, fields)


def priorities(problem: Problem, start: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [N], whole numbers that fall with the start; at equal starts, with the problem's topological order."""
    falling = np.empty(problem.num_ops)
    falling[np.lexsort((np.argsort(problem.topological_order), start))] = np.arange(problem.num_ops, 0.0, -1.0)
    return falling


def expand_solution(coarse: Instance, solution: Solution, problem: Problem, part: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [N], a rank for every op of a problem: by the start of its part in the coarse problem, then topologically.

    Args:
        coarse: The coarse problem in ticks.
        solution: A solution of the coarse problem.
        problem: The problem.
        part: int64 [N], coarse op of every op.
    """
    devices = solution.device_of_group[coarse.problem.op_group]
    end = solution.start + coarse.duration[np.arange(coarse.problem.num_ops), devices]
    inner, outer = np.argsort(problem.topological_order), np.argsort(coarse.problem.topological_order)
    # An op of no time goes before one that starts with it, and what feeds it goes before it.
    return np.argsort(np.lexsort((inner, outer[part], end[part], solution.start[part])))


def ranked_orders(problem: Problem, devices: Assignment, rank: NDArray[np.int64]) -> list[list[int]]:
    """Per device its ops by rank; ops of collectives are left out."""
    order: list[list[int]] = [[] for _ in problem.devices]
    apart = {op for collective in problem.collectives for op in collective.ops}
    for op in np.argsort(rank).tolist():
        if op not in apart:
            order[devices[problem.op_group[op]]].append(op)
    return order
