"""The solver on a placement program: hint, limits, proven bound, and plans of its solutions.

One worker and a limit on deterministic time make the result a function of the program and the seed. A limit in seconds, when a
user sets one, ends the search too; how far it comes then depends on the speed of the machine.

The solver also decides when things run. A plan can carry that as an order of ops on every device, which the executor follows to
the letter, or as priorities, which it prefers where ops compete; or not at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment, PlanEvaluator
from rlplace.placement.published.dlplacer.instance import TickedProblem
from rlplace.placement.published.dlplacer.program import PlacementProgram, relabel, solver_library
from rlplace.simulator import Timeline

_STAGES = ((False, 0.4), (True, 0.6))
"""Whether searches take turns, and the share of the limits: conflict-driven search alone is better on some programs, the
portfolio with its neighbourhood searches on others."""

EFFORT = 20.0
"""Default limit in the solver's deterministic seconds; one of them takes from one to some ten seconds on a core, by program."""


@dataclass(frozen=True, eq=False)
class Solution:
    """One solution of the program.

    Attributes:
        device_of_group: int32 [G].
        start: int64 [K], start of each task in ticks.
        makespan: End of the last task in ticks.
    """

    device_of_group: NDArray[np.int32]
    start: NDArray[np.int64]
    makespan: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of the solver.

    Attributes:
        status: ``"optimal"``, ``"feasible"``, ``"infeasible"`` or ``"unknown"`` (nothing found, nothing proven).
        objective_s: Makespan of the best solution, None without one.
        bound_s: No solution of the program is shorter; inf when it has none.
        solutions: Improving solutions, the best first.
    """

    status: str
    objective_s: float | None
    bound_s: float
    solutions: tuple[Solution, ...]

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective on the program; None without a solution."""
        if self.objective_s is None:
            return None
        return max(0.0, 1.0 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0


def solve_program(
    program: PlacementProgram, *, hint: Timeline | None, seed: int, effort: float, time_limit_s: float
) -> Outcome:
    """Solves a program.

    Args:
        program: The program.
        hint: A simulated step that is a solution of it, to start from.
        seed: The solver's random seed.
        effort: Limit in deterministic seconds.
        time_limit_s: Limit in seconds, inf for none.
    """
    solver_library()  # a clear error where it is missing
    from ortools.sat.python import cp_model

    if hint is not None:
        add_hint(program, hint)
    solutions: list[Solution] = []

    class Keep(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            solutions.append(_read(program, self.value, self.boolean_value))

    end_s = time.monotonic() + time_limit_s
    best_ticks: int | None = None
    bound_ticks, name = 0.0, "unknown"
    for interleaved, share in _STAGES:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.interleave_search = interleaved
        solver.parameters.random_seed = seed % (1 << 31)
        solver.parameters.max_deterministic_time = share * effort
        if math.isfinite(time_limit_s):
            solver.parameters.max_time_in_seconds = max(
                share * time_limit_s, end_s - time.monotonic() if interleaved else 0.0, 0.01
            )
        status = _interruptible(solver, program.model, Keep())
        if status == cp_model.INFEASIBLE:
            return Outcome("infeasible", None, math.inf, ())
        bound_ticks = max(bound_ticks, float(solver.best_objective_bound))
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            ticks = round(solver.objective_value)
            best_ticks = ticks if best_ticks is None else min(best_ticks, ticks)
            name = "optimal" if status == cp_model.OPTIMAL or bound_ticks >= best_ticks else "feasible"
            if name == "optimal":
                break
            _hint_solution(program.model, solver)
    seconds = program.instance.ticks.seconds
    objective_s = None if best_ticks is None else seconds(best_ticks)
    return Outcome(name, objective_s, seconds(bound_ticks), tuple(sorted(solutions[::-1], key=lambda s: s.makespan)))


def _interruptible(solver: Any, model: Any, callback: Any) -> Any:
    """Solves on a thread, so that Ctrl-C ends the planner: the solver alone would stop and return as usual."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(solver.solve, model, callback)
        try:
            return running.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def _hint_solution(model: Any, solver: Any) -> None:
    """Hints the next search with the solution of this one."""
    model.clear_hints()
    values = solver.response_proto.solution
    for index in range(len(values)):
        model.add_hint(model.get_int_var_from_proto_index(index), values[index])


def _read(program: PlacementProgram, value: Any, boolean: Any) -> Solution:
    devices = [next(d for d, literal in literals.items() if boolean(literal)) for literals in program.placed]
    start = np.array([value(start) for start in program.start], dtype=np.int64)
    return Solution(np.array(devices, dtype=np.int32), start, int(value(program.makespan)))


def add_hint(program: PlacementProgram, line: Timeline) -> None:
    """Hints the solver with a simulated step, its devices renamed so that it obeys the symmetry breaking."""
    instance, model = program.instance, program.model
    model.clear_hints()
    simulated = np.zeros(len(program.placed), dtype=np.int32)
    simulated[instance.problem.op_group] = line.device_of_op
    names = relabel(program, simulated)
    devices = names[simulated].tolist()
    for group, literals in enumerate(program.placed):
        for device, literal in literals.items():
            model.add_hint(literal, devices[group] == device)
    start = instance.ticks.down(line.start_s).tolist()
    for task, variable in enumerate(program.start):
        model.add_hint(variable, start[task])
    assert line.step_time_s is not None
    model.add_hint(program.makespan, int(instance.ticks.down(np.array([line.step_time_s]))[0]))
    for (first, second), literal in program.apart.items():
        model.add_hint(literal, devices[first] != devices[second])
    moved = _moved(program, line, names)
    for key, literal in program.needed.items():
        model.add_hint(literal, key in moved)
    for key, variable in program.sent.items():
        if key in moved:
            model.add_hint(variable, moved[key][0])
    for (value, source, device), literal in program.carried.items():
        if literal is not program.needed[value, device]:
            model.add_hint(literal, (value, device) in moved and moved[value, device][1] == source)


def _moved(program: PlacementProgram, line: Timeline, names: NDArray[np.int32]) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns start in ticks and source of every transfer, by value and renamed destination."""
    start = program.instance.ticks.down(line.transfer_start_s).tolist()
    rows = zip(
        line.transfer_tensor.tolist(), line.transfer_source.tolist(), line.transfer_destination.tolist(), start, strict=True
    )
    return {(tensor, int(names[there])): (begun, int(names[here])) for tensor, here, there, begun in rows}


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
    evaluator: PlanEvaluator,
    instance: TickedProblem,
    solution: Solution,
    devices: Assignment,
    part: NDArray[np.int64] | None = None,
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
