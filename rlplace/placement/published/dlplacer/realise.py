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

from rlplace.placement.common.evaluate import Assignment, PlanEvaluator
from rlplace.placement.published.dlplacer.instance import Instance
from rlplace.placement.published.dlplacer.solve import Solution
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


def realise(
    evaluator: PlanEvaluator, instance: Instance, solution: Solution, devices: Assignment, part: NDArray[np.int64] | None = None
) -> Iterator[Realised]:
    """Yields the ways to run a solution, the plainest first: default priorities, the solver's starts as priorities, its order.

    Args:
        evaluator: Simulates and counts.
        instance: The program's problem in ticks.
        solution: A solution of the program.
        devices: int32 [G], the assignment that it means for the evaluator's problem.
        part: int64 [N], op of the program of every op; None where the program is that of the problem itself.
    """
    problem = evaluator.problem
    of = np.arange(problem.num_ops) if part is None else part
    there = solution.device_of_group[instance.problem.op_group]
    end = solution.start + instance.duration[np.arange(len(there)), there]
    inner, outer = np.argsort(problem.topological_order), np.argsort(instance.problem.topological_order)
    # An op of no time goes before one that starts with it, and what feeds it goes before it.
    sequence = np.lexsort((inner, outer[of], end[of], solution.start[of]))
    order: list[list[int]] = [[] for _ in problem.devices]
    apart = {op for collective in problem.collectives for op in collective.ops}
    for op in sequence.tolist():
        if op not in apart:
            order[devices[problem.op_group[op]]].append(op)
    falling = np.empty(problem.num_ops)  # at equal starts in the problem's topological order
    by_start = np.lexsort((inner, solution.start)) if part is None else sequence
    falling[by_start] = np.arange(problem.num_ops, 0.0, -1.0)
    ways: list[dict[str, Any]] = [{}, {"priority": falling}, {"order": order}]
    for fields in ways:
        yield Realised(evaluator.timeline(devices, **fields), devices, fields)
