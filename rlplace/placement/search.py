"""Budget, start and best answer so far of the search planners.

Random changes of an assignment, shared by the search planners.

Kinds, with their share of the draws:
    neighbor 32 %  one group joins the device of a group it exchanges tensors with
    single   18 %  one group goes to a random device
    swap     12 %  two groups on different devices change places
    segment  28 %  consecutive groups of the depth-first order go to one device, mostly that of the group before or after them
    cluster  10 %  a group and some of its neighbors on the same device move together
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, whole_number
from rlplace.placement.best import floor_answers, warm_up
from rlplace.placement.common.evaluate import Answer, Assignment, Deadline, Evaluator, Score
from rlplace.placement.common.floor import finish, with_options
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.common.movekernels import CLUSTER, Tables, draw
from rlplace.placement.common.repair import legalize
from rlplace.placement.common.shortage import check_possible
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator.inputs import check_devices

FLOOR_SHARE = 0.4
"""Of a time limit, the share after which one-shot planners that have not begun are left out: a search gains more by then."""


class MoveMaker:
    """Draws random moves for one problem; a move is a list of (group, device).

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
        """Whether any group may sit on more than one device."""
        return len(self.tables.movable) > 0

    def draw(self, devices: Assignment) -> list[tuple[int, int]]:
        """A move that changes `devices` int32 [G]; empty when the draw gave none."""
        count = draw(*self._arguments, devices, self.groups, self.targets)
        return list(zip(self.groups[:count].tolist(), self.targets[:count].tolist(), strict=True))


CALLS = 4096
"""Simulations of a search without any other limit."""

Start = PlacementPlan | Sequence[int] | NDArray[Any] | None


def start_devices(problem: Problem, start: Start, planner: str) -> Assignment:
    """int32 [G], the devices of a start."""
    devices = start.device_of_group if isinstance(start, PlacementPlan) else start
    try:
        return check_devices(devices, (problem.num_groups,), problem)
    except InputError as error:
        raise InputError(f"{planner}: start must be a plan or name a device for every group: {error}") from None


class Search:
    """A search from the floor, or from a given plan, within a budget of simulator calls and seconds.

    Attributes:
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
        check_possible(problem)
        warm_up()
        self.deadline = Deadline(time_limit_s)
        self.evaluator = Evaluator(problem)
        self.starts = self._start(problem, start, planner, time_limit_s)
        answer = self.starts[0]
        self.calls = CALLS if calls is None and time_limit_s is None else calls
        self._first = self.evaluator.calls
        self._began_s = self.deadline.left_s()
        self.assignment = answer.devices.copy()
        self.score = self.best_score = answer.score
        self.best_devices: Assignment = answer.devices

    def _start(self, problem: Problem, start: Start, planner: str, limit_s: float | None) -> list[Answer]:
        if start is None:  # the first candidate is always looked at
            deadline = Deadline(None if limit_s is None else FLOOR_SHARE * limit_s)
            answers = [answer for _, answer in floor_answers(problem, self.evaluator, deadline)]
            self.deadline.secured = deadline.secured
            return sorted(answers, key=lambda answer: answer.score.objective_s)
        return [self.evaluator.answer(legalize(problem, start_devices(problem, start, planner)))]

    def used(self) -> int:
        """Simulator calls after the floor."""
        return self.evaluator.calls - self._first

    def progress(self) -> float:
        """Share of the budget that is spent, 1 when the search must stop."""
        share = 0.0
        if self.calls is not None:
            share = self.used() / self.calls if self.calls else 1.0
        if self._began_s != float("inf"):
            left = self.deadline.left_s()
            share = max(share, 1.0 - left / self._began_s if self._began_s > 0 else 1.0)
        return share

    def evaluate(self, move: list[tuple[int, int]]) -> Score:
        """Scores the current assignment with a move applied; keeps only a new best answer."""
        before = self.assignment.copy()
        for group, device in move:
            self.assignment[group] = device
        score = self.evaluator.score(self.assignment)
        if score.objective_s < self.best_score.objective_s:
            self.best_devices, self.best_score = self.assignment.copy(), score
        self.assignment[:] = before
        return score

    def accept(self, move: list[tuple[int, int]], score: Score) -> None:
        """Applies a move that was evaluated."""
        for group, device in move:
            self.assignment[group] = device
        self.score = score

    def settle(self, score: Score, best_devices: Assignment, best_score: Score) -> None:
        """Takes over the result of a compiled loop: it has changed `assignment`, whose score is an argument."""
        self.score, self.best_devices, self.best_score = score, best_devices, best_score

    def restart(self) -> None:
        """Goes back to the best assignment."""
        self.assignment[:] = self.best_devices
        self.score = self.best_score

    def answer(self) -> Answer:
        """The best answer."""
        return Answer(self.best_devices, self.best_score, np.zeros(0, dtype=np.int64))


def search_planner(name: str, module: ModuleType) -> Callable[..., PlacementPlan]:
    """The planner of a module that defines `SETTINGS`, a dataclass of its options, and `spend`, which spends a search's budget.

    It raises InfeasibleError where neither the floor nor the search found a plan that fits.
    """

    def planner(
        problem: Problem,
        *,
        seed: int = 0,
        time_limit_s: float | None = None,
        calls: int | None = None,
        start: Start = None,
        **options: Any,
    ) -> PlacementPlan:
        settings = module.SETTINGS(**options)
        getattr(module, "warm_up", warm_up)()
        search = Search(problem, name, start, calls=calls, time_limit_s=time_limit_s)
        module.spend(search, seed, settings)
        return finish(problem, search.answer(), planner=name, seed=seed)

    planner.__name__, planner.__doc__ = name, module.__doc__
    return with_options(planner, list(inspect.signature(module.SETTINGS).parameters.values()))
