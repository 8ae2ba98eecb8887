"""The floor, and what search planners share: budget, start, best answer so far, and random changes of an assignment.

Kinds of changes, with their share of the draws:
    neighbor 32 %  one group joins the device of a group it exchanges tensors with
    single   18 %  one group goes to a random device
    swap     12 %  two groups on different devices change places
    segment  28 %  consecutive groups of the depth-first order go to one device, mostly that of the group before or after them
    cluster  10 %  a group and some of its neighbors on the same device move together

The floor, `best`: all one-shot planners with the shared memory repair, no search. Every other planner is compared with it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.budget import Budget
from rlplace.errors import InputError, whole_number
from rlplace.placement import ONE_SHOT, get_planner
from rlplace.placement.common.evaluate import Assignment, PlanEvaluator, Score, ScoredAssignment, uncounted
from rlplace.placement.common.floor import best_of, described, finish
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.common.movekernels import CLUSTER, Tables, draw
from rlplace.placement.common.repair import legalize
from rlplace.placement.common.shortage import check_possible
from rlplace.placement.published.compiler import warm_up as warm_up_partitions
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator.records import check_devices


def best(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None) -> PlacementPlan:
    """Returns the best plan of all one-shot planners, each of which yields a few candidates (devices, orders, weights).

    It is never worse than any of them. Without a time limit it is deterministic and does not depend on the seed.
    """
    warm_up()
    budget = Budget(seconds=time_limit_s)
    check_possible(problem)
    if time_limit_s is not None:
        assert problem.fingerprint  # which the plan needs: the time that it takes is none of the planners'
    answer = best_answer(PlanEvaluator(problem, budget))
    return finish(problem, answer, planner="best", seed=seed)


@cache
def warm_up() -> None:
    """Compiles, or loads from the cache, what the one-shot planners run, so that time limits do not pay for it."""
    problem = random_problem(1, 8, 3, memory_factor=1.0, unlike=True, hosts=2)  # tight enough for repairs
    with uncounted():
        for _ in floor_answers(PlanEvaluator(problem)):
            pass
    warm_up_partitions(problem)


def best_answer(evaluator: PlanEvaluator) -> ScoredAssignment | None:
    """Returns the result of `best` as an answer; the infeasible one nearest to fitting when nothing fits."""
    answers = [answer for _, answer in floor_answers(evaluator)]
    return min(answers, key=lambda a: a.score.objective_s, default=None)


def floor_answers(evaluator: PlanEvaluator) -> Iterator[tuple[str, ScoredAssignment]]:
    """Yields the name and best answer of every one-shot planner, feasible or not; stops when the time is up.

    Once a quarter of the time is gone, plans that do not fit and are slower than one that is known are not repaired.

    The problem must have passed `rlplace.placement.common.shortage.check_possible`.
    """
    problem, budget = evaluator.problem, evaluator.budget
    known_s, whole_s = math.inf, budget.left_s()
    for name in ONE_SHOT:
        if name == "compiler" and known_s < math.inf and budget.left_s() < 0.5 * whole_s:
            return  # its first partition takes up to as long as all others together
        planner: Any = get_planner(name)
        slower_s = known_s if budget.left_s() < 0.75 * whole_s else math.inf
        answer = best_of(evaluator, planner.candidates(problem, 0), repairs=planner.repairs, known_s=slower_s)
        if answer is not None:
            yield name, answer
            known_s = min(known_s, answer.score.step_time_s) if answer.score.feasible else known_s
        if budget.passed():
            return


FLOOR_SHARE = 0.4
"""Of a time limit, the share after which one-shot planners that have not begun are left out: a search gains more by then."""


Move = list[tuple[int, int]]
"""Groups and the devices that they go to."""


class MoveMaker:
    """Draws random moves for one problem.

    Attributes:
        tables: Tables from which moves are drawn.
        state: uint64 [1], state of the random numbers.
        groups: int32 [max(G, CLUSTER)], the groups of the last move; longer than it.
        targets: int32 [max(G, CLUSTER)], their devices.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        graph = group_graph(problem)
        may = problem.group_allowed
        rows, devices = np.nonzero(may)
        self.tables = Tables(
            may=may,
            allowed_ptr=np.searchsorted(rows, np.arange(problem.num_groups + 1)).astype(np.int64),
            allowed=devices.astype(np.int32),
            movable=np.flatnonzero(may.sum(axis=1) > 1).astype(np.int32),
            neighbor_ptr=graph.neighbor_ptr,
            neighbor=graph.neighbor,
            order=graph.depth_first_order,
            position=np.argsort(graph.depth_first_order),
        )
        self.state = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        self.groups: NDArray[np.int32] = np.zeros(max(problem.num_groups, CLUSTER), dtype=np.int32)
        self.targets = self.groups.copy()
        self._arguments = tuple(self.tables), self.state

    @property
    def movable(self) -> bool:
        """True where some group may sit on more than one device."""
        return len(self.tables.movable) > 0

    def draw(self, devices: Assignment) -> Move:
        """Returns a move that changes `devices` int32 [G]; empty when the draw gave none."""
        count = draw(*self._arguments, devices, self.groups, self.targets)
        return list(zip(self.groups[:count].tolist(), self.targets[:count].tolist(), strict=True))


CALLS = 4096
"""Simulations of a search without any other limit."""

Start = PlacementPlan | Sequence[int] | NDArray[Any] | None


def start_devices(problem: Problem, start: Start, planner: str) -> Assignment:
    """Returns int32 [G], the devices of a start."""
    devices = start.device_of_group if isinstance(start, PlacementPlan) else start
    try:
        return check_devices(devices, (problem.num_groups,), problem)
    except InputError as error:
        raise InputError(f"{planner}: start must be a plan or name a device for every group: {error}") from None


class PlacementSearch:
    """A search from the floor, or from a given plan, within a budget of simulator calls and seconds.

    Attributes:
        evaluator: Simulates, and counts what the search uses of its budget after the floor.
        assignment: int32 [G], the current one; compiled loops that change it call `settle`.
        score: Score of the current assignment.
        best_devices: int32 [G], the best assignment so far.
        best_score: Score of the best assignment so far.
        starts: The floor's answers, one a one-shot planner and the best first, or the given start alone.
    """

    def __init__(
        self,
        problem: Problem,
        planner: str,
        start: Start,
        *,
        calls: int | None,
        time_limit_s: float | None,
    ) -> None:
        if calls is not None:
            whole_number(calls, f"{planner}: calls")
        warm_up()
        self.budget = Budget(CALLS if calls is None and time_limit_s is None else calls, time_limit_s)
        check_possible(problem)
        # The first candidate of the floor is simulated whatever the limit.
        floor = PlanEvaluator(problem, Budget(seconds=None if time_limit_s is None else FLOOR_SHARE * self.budget.left_s()))
        if start is None:
            answers = [answer for _, answer in floor_answers(floor)]
            self.starts = sorted(answers, key=lambda answer: answer.score.objective_s)
        else:
            self.starts = [floor.answer(legalize(problem, start_devices(problem, start, planner)))]
        self.budget.start_clock(self.budget.left_s())
        self.evaluator = PlanEvaluator(problem, self.budget, simulator=floor.simulator)
        answer = self.starts[0]
        self.assignment = answer.devices.copy()
        self.score = self.best_score = answer.score
        self.best_devices: Assignment = answer.devices

    def evaluate(self, move: Move) -> Score:
        """Scores the current assignment with a move applied; keeps only a new best answer."""
        before = self.assignment.copy()
        for group, device in move:
            self.assignment[group] = device
        score = self.evaluator.score(self.assignment)
        if score.objective_s < self.best_score.objective_s:
            self.best_devices, self.best_score = self.assignment.copy(), score
        self.assignment[:] = before
        return score

    def accept(self, move: Move, score: Score) -> None:
        """Applies a move that was evaluated."""
        for group, device in move:
            self.assignment[group] = device
        self.score = score

    def settle(self, score: Score, best_devices: Assignment, best_score: Score) -> None:
        """Takes over the result of a compiled loop: it has changed `assignment`, whose score is an argument."""
        self.score, self.best_devices, self.best_score = score, best_devices, best_score

    def restart(self) -> None:
        """Takes the best assignment as the current one."""
        self.assignment[:] = self.best_devices
        self.score = self.best_score

    def answer(self) -> ScoredAssignment:
        """Returns the best answer."""
        return ScoredAssignment(self.best_devices, self.best_score, np.zeros(0, dtype=np.int64))


class SearchPlanner:
    """A planner that spends a search's budget; called like any planner, with `calls`, `start` and its settings as options.

    It raises InfeasibleError where neither the floor nor the search found a plan that fits.

    Attributes:
        spend: Spends the budget of a search, from a seed and the settings.
        settings: The dataclass of its settings.
    """

    __name__: str

    def __init__(self, spend: Spend, settings: type[Any], doc: str | None, ready: Callable[[], None]) -> None:
        self.spend, self.settings, self.ready = spend, settings, ready
        described(self, spend.__name__, doc, list(inspect.signature(settings).parameters.values()))

    def __call__(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        time_limit_s: float | None = None,
        calls: int | None = None,
        start: Start = None,
        **options: Any,
    ) -> PlacementPlan:
        settings = self.settings(**options)
        self.ready()
        search = PlacementSearch(problem, self.__name__, start, calls=calls, time_limit_s=time_limit_s)
        self.spend(search, seed, settings)
        return finish(problem, search.answer(), planner=self.__name__, seed=seed)


Spend = Callable[[PlacementSearch, int, Any], None]


def search_planner(
    settings: type[Any], *, doc: str | None = None, ready: Callable[[], None] = warm_up
) -> Callable[[Spend], SearchPlanner]:
    """Decorates a function that spends the budget of a search, named as the planner that it becomes.

    Args:
        settings: Dataclass of its options.
        doc: Docstring of the planner.
        ready: Compiles what it runs, so that time limits do not pay for it.
    """
    return partial(SearchPlanner, settings=settings, doc=doc, ready=ready)
