"""One-shot planners: devices to use, parts on devices, and the choice among candidates.

A one-shot planner yields a few candidates. They are simulated, the most promising ones that do not fit are repaired, and the
best feasible one becomes the plan. Nothing here searches.

Leaving devices unused is often best when links are slow, so that every constructive planner builds one candidate per number of
devices. Fast and well connected devices come first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.budget import Budget
from rlplace.placement.common import kernels
from rlplace.placement.common.evaluate import Assignment, PlanEvaluator, ScoredAssignment
from rlplace.placement.common.groupgraph import finite_links, finite_mean, group_graph
from rlplace.placement.common.repair import legalize, repair_answer
from rlplace.placement.common.shortage import check_possible, raise_infeasible
from rlplace.plan import PlacementPlan, make_plan
from rlplace.problem import Problem
from rlplace.simulator import simulate

MAX_COUNTS = 12
"""Device counts tried where there are more devices."""

MAX_COUNTS_LARGE = 4
"""Device counts tried for problems of more than `LARGE_OPS` ops, where every candidate takes a tenth of a second."""

LARGE_OPS = 30_000


def device_classes(problem: Problem, among: Sequence[int] | None = None) -> list[list[int]]:
    """Returns classes of devices, of all or of some, with equal op times, equal memory and the same allowed groups."""
    graph = group_graph(problem)
    classes: dict[tuple[bytes, float], list[int]] = {}
    for device in range(problem.num_devices) if among is None else among:
        key = (graph.time_s[:, device].tobytes(), float(problem.memory_limit_bytes[device]))
        classes.setdefault(key, []).append(device)
    return list(classes.values())


def device_order(problem: Problem) -> list[int]:
    """Returns all devices in greedy order: the next one is the fastest for its links to those before it.

    Speed is the mean group time on the device; links count with the mean traffic of a group.
    """
    graph = group_graph(problem)
    runs = np.isfinite(graph.time_s).sum(axis=0)
    mean_s = finite_mean(graph.time_s, axis=0)
    # A device that runs few groups is a poor choice however fast it runs them.
    mean_s = mean_s + graph.mean_time_s.mean() * 10.0 * (1.0 - runs / max(problem.num_groups, 1))
    latency, inverse = finite_links(problem)
    edge = graph.edge_bytes.mean() if len(graph.edge_bytes) else 0.0
    link_s = latency + latency.T + edge * (inverse + inverse.T)
    chosen = [int(mean_s.argmin())]
    rest = [d for d in range(problem.num_devices) if d != chosen[0]]
    while rest:
        cost = [float(mean_s[d]) + float(link_s[d, chosen].mean()) for d in rest]
        chosen.append(rest.pop(int(np.argmin(cost))))
    return chosen


def device_subsets(problem: Problem, *, least: int = 1) -> list[list[int]]:
    """Returns prefixes of `device_order` by increasing length, at most `MAX_COUNTS` of them, the full set always included.

    Of large problems those are left out that cannot hold the resident bytes: their plans would have to be made anew by repair.
    """
    order = device_order(problem)
    most = MAX_COUNTS if problem.num_ops <= LARGE_OPS else MAX_COUNTS_LARGE
    if problem.num_ops > LARGE_OPS:
        enough = np.flatnonzero(np.cumsum(problem.memory_limit_bytes[order]) >= problem.resident_bytes.sum())
        least = max(least, int(enough[0]) + 1) if len(enough) else len(order)
    sizes = list(range(least, len(order) + 1))
    if len(order) > most:
        sizes = np.unique(np.round(np.geomspace(max(least, 1), len(order), most)).astype(int)).tolist()
    return [order[:size] for size in sizes]


def map_parts(problem: Problem, part_of_group: NDArray[np.int32], devices: Sequence[int]) -> NDArray[np.int32]:
    """Places part p on a device of `devices`, and swaps parts between devices while that lowers load and traffic.

    Args:
        problem: The problem.
        part_of_group: int32 [G], part numbers below ``len(devices)``.
        devices: Device of each part to start from.

    Returns:
        int32 [G], device of every group.
    """
    where = np.array(devices, dtype=np.int64)
    parts = len(where)
    graph = group_graph(problem)
    latency, inverse = finite_links(problem)
    off = ~np.eye(len(latency), dtype=bool)
    like = np.ptp(graph.time_s, axis=1) == 0 if np.isfinite(graph.time_s).all() else np.zeros(1, dtype=bool)
    if parts > 1 and not (np.ptp(inverse[off]) == 0 and np.ptp(latency[off]) == 0 and like.all()):
        source, target = part_of_group[graph.source], part_of_group[graph.target]
        cross = source != target
        size, count, load = np.zeros((parts, parts)), np.zeros((parts, parts)), np.zeros((parts, problem.num_devices))
        np.add.at(size, (source[cross], target[cross]), graph.edge_bytes[cross])
        np.add.at(count, (source[cross], target[cross]), graph.edge_count[cross])
        barred_s = 1e3 * graph.mean_time_s[:, None] + 1.0
        np.add.at(load, part_of_group, np.where(np.isfinite(graph.time_s), graph.time_s, barred_s))
        kernels.swap_parts(where, size, count, load, latency, inverse, 3)
    return where.astype(np.int32)[part_of_group]


REPAIRS = 3
"""Infeasible candidates that a planner repairs, most promising first."""


def best_of(
    evaluator: PlanEvaluator, candidates: Iterable[Assignment | None], *, repairs: int = REPAIRS, known_s: float = math.inf
) -> ScoredAssignment | None:
    """Simulates candidates, repairs the most promising infeasible ones and returns the best answer.

    Args:
        evaluator: When its time is up, or when as much work again as the last would take twice what is left, the candidates
            known by then are ranked.
        candidates: Assignments; groups on devices that are not allowed are moved first. None: a piece of work is done, which is
            a moment to look at the clock.
        repairs: Number of infeasible candidates to repair.
        known_s: Step time of a feasible plan that is known; what is slower is not repaired.

    Returns:
        The best answer, feasible if any is, or None when there was no candidate.
    """
    budget = evaluator.budget
    answers: list[ScoredAssignment] = []
    seen: set[bytes] = set()
    left_s = budget.left_s()
    for devices in candidates:
        legal = None if devices is None else legalize(evaluator.problem, devices)
        if legal is not None and legal.tobytes() not in seen:
            seen.add(legal.tobytes())
            answers.append(evaluator.answer(legal))
        before_s, left_s = left_s, budget.left_s()
        if budget.passed() or (budget.secured and before_s - left_s > 2.0 * left_s):
            break
    if not answers:
        return None
    answers.sort(key=lambda a: a.score.objective_s)
    best = answers[0]
    # A repaired plan is rarely faster than it was before, so candidates that are already slower are not worth the calls.
    limit_s = min(known_s, best.score.step_time_s if best.score.feasible else math.inf)
    open_ = [a for a in answers if not a.score.feasible and a.score.step_time_s < limit_s]
    open_.sort(key=lambda a: a.score.descent_s)
    for answer in open_[:repairs]:
        if budget.passed():
            break
        repaired = repair_answer(evaluator, answer.devices)
        if repaired.score.objective_s < best.score.objective_s:
            best = repaired
    return best


def finish(problem: Problem, answer: ScoredAssignment | None, *, planner: str, seed: int) -> PlacementPlan:
    """Builds the plan of an answer, with the simulator's prediction.

    Raises:
        InfeasibleError: There is no answer, or it does not fit.
    """
    line = None if answer is None else simulate(problem, answer.devices)
    if answer is None or line is None or not line.feasible:
        raise_infeasible(problem, line, planner=planner)
    return make_plan(problem, answer.devices, planner=planner, seed=seed, predicted=line.predicted(problem))


class OneShotPlanner:
    """A planner that only builds candidates; called like any planner.

    Attributes:
        candidates: Yields assignments of a problem, or None after a piece of work, from a seed and the planner's options.
        repairs: Number of infeasible candidates that are repaired.
    """

    __name__: str

    def __init__(self, candidates: Callable[..., Iterable[Assignment | None]], name: str, repairs: int) -> None:
        self.candidates, self.repairs = candidates, repairs
        described(self, name, candidates.__doc__, list(inspect.signature(candidates).parameters.values())[2:])

    def __call__(self, problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, **options: Any) -> PlacementPlan:
        budget = Budget(seconds=time_limit_s)
        check_possible(problem)
        evaluator = PlanEvaluator(problem, budget)
        answer = best_of(evaluator, self.candidates(problem, seed, **options), repairs=self.repairs)
        return finish(problem, answer, planner=self.__name__, seed=seed)


def one_shot_planner(
    name: str, *, repairs: int = REPAIRS
) -> Callable[[Callable[..., Iterable[Assignment | None]]], OneShotPlanner]:
    """Decorates a function of a problem, a seed and options that yields assignments, or None after a piece of work: it becomes
    a planner.
    """
    return partial(OneShotPlanner, name=name, repairs=repairs)


def described(planner: Any, name: str, doc: str | None, options: Sequence[inspect.Parameter]) -> None:
    """Gives a callable object name and docstring of a planner, and a signature that names its options instead of taking any."""
    signature = inspect.signature(type(planner).__call__)
    _, *own, _ = signature.parameters.values()  # without self and the options
    named = [option.replace(kind=option.KEYWORD_ONLY) for option in options]
    planner.__name__, planner.__doc__, planner.__signature__ = name, doc, signature.replace(parameters=[*own, *named])
