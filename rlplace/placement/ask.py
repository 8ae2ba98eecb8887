"""The question of placements: which device every group of one pass runs on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError, InputError, MissingError, RlplaceError, whole_number
from rlplace.placement import NEEDS_SPLIT, get_planner
from rlplace.placement.common.evaluate import count_calls
from rlplace.plan.plan import PlacementPlan, check_plan
from rlplace.plan.prediction import Prediction
from rlplace.problem import Problem

if TYPE_CHECKING:
    from rlplace.cluster.parse import Cluster
    from rlplace.model.graph.opgraph import OpGraph

OK, INFEASIBLE, MISSING, FAILED = "ok", "infeasible", "missing", "failed"


@dataclass(frozen=True, eq=False)
class Attempt:
    """A plan or an error, with time and simulator calls.

    Attributes:
        answer: The plan; None where there is none.
        judged: Result of `judge` for the plan.
        error: The error of the planner, or of `judge`; None without one.
        seconds: Wall-clock time of the planner.
        simulator_calls: Simulations that it made.
    """

    answer: PlacementPlan | None
    judged: Any
    error: Exception | None
    seconds: float
    simulator_calls: int

    @property
    def plan(self) -> PlacementPlan:
        """The plan; where there is none, the error is raised."""
        if self.answer is None:
            assert self.error is not None
            raise self.error
        return self.answer

    @property
    def status(self) -> str:
        """One of `OK`, `INFEASIBLE`, `MISSING` (an extra) and `FAILED`."""
        if self.error is None:
            return OK
        kinds = {InfeasibleError: INFEASIBLE, MissingError: MISSING}
        return next((status for kind, status in kinds.items() if isinstance(self.error, kind)), FAILED)

    @property
    def reason(self) -> str | None:
        """The error in one line, of a bug with its type; None without one."""
        if self.error is None:
            return None
        text = " ".join(str(self.error).split()) or type(self.error).__name__
        return text if isinstance(self.error, RlplaceError) else f"{type(self.error).__name__}: {text}"


def attempt(
    planner: Callable[..., PlacementPlan],
    problem: Problem,
    *,
    seed: int = 0,
    judge: Callable[[PlacementPlan], Any] | None = None,
    catch: tuple[type[Exception], ...] = (InfeasibleError,),
    **options: Any,
) -> Attempt:
    """Runs a planner, and measures it.

    Args:
        planner: A planner, or a function that is called like one.
        problem: The problem to place.
        seed: Seed of all random choices.
        judge: Checks the plan after the clock has stopped; its errors count as the planner's.
        catch: Errors that are recorded; others are raised.
        **options: Budget (`calls`, `time_limit_s`), `start` and other options of the planner.
    """
    answer, judged, caught = None, None, None
    took_s, own_calls = None, 0
    begin_s = time.perf_counter()
    with count_calls() as counter:
        try:
            answer = planner(problem, seed=seed, **options)
            took_s = time.perf_counter() - begin_s
            own_calls = answer.predicted.search_calls or 0  # of a planner that simulates without an `Evaluator`
            judged = None if judge is None else judge(answer)
        except catch as error:
            caught = error
    took_s = time.perf_counter() - begin_s if took_s is None else took_s
    return Attempt(answer, judged, caught, took_s, max(own_calls, counter.calls))


OP_LEVEL_TRIES = 3
"""Largest number of times that planning starts again because the plan does not fit op by op."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A plan and the problem that it solves.

    Attributes:
        problem: The problem at task level.
        plan: The plan.
        op_problem: The problem at op level; None when only a problem was given.
        graph: Its graph; None when only a problem was given.
    """

    problem: Problem
    plan: PlacementPlan
    op_problem: Problem | None
    graph: OpGraph | None


@dataclass(frozen=True, eq=False)
class Priced:
    """The input of a placement: a problem, or a graph that can be priced task by task and op by op.

    Attributes:
        first: The problem as given, at task level.
        graph: Its graph; None when only a problem was given.
        build: `rlplace.price` on the same cluster, with further arguments; None when only a problem was given.
        graph_at: Captures the graph with a number of samples; None where that is not needed.
    """

    first: Problem
    graph: OpGraph | None = None
    build: Callable[..., Problem] | None = None
    graph_at: Callable[[int], OpGraph] | None = None

    @staticmethod
    def of(graph: OpGraph, cluster: Cluster, graph_at: Callable[[int], OpGraph] | None = None, **pricing: Any) -> Priced:
        """Returns a captured graph on a cluster. `pricing` holds arguments of `rlplace.price`."""
        from rlplace.cost.price import price

        def build(graph: OpGraph, **how: Any) -> Problem:
            return price(graph, cluster, **{**pricing, **how})

        return Priced(build(graph), graph, build, graph_at)

    def prepared_for(self, planner: str) -> Priced:
        """Returns the same for a planner that places the backward of groups apart; else unchanged."""
        if planner in NEEDS_SPLIT:
            from rlplace.cost.contract import split_backward
            from rlplace.placement.published.bipartition.layers import is_split

            return self if is_split(self.first) else self._changed(split_backward)
        return self

    def holding_back(self, size_bytes: NDArray[np.int64]) -> Priced:
        """Returns the same with int64 [D] bytes less memory on every device."""

        def less(problem: Problem) -> Problem:
            devices = tuple(
                device
                if device.memory_bytes is None
                else dataclasses.replace(device, memory_bytes=max(device.memory_bytes - n, 0))
                for device, n in zip(problem.devices, size_bytes.tolist(), strict=True)
            )
            return dataclasses.replace(problem, devices=devices)

        return self._changed(less) if size_bytes.any() else self

    def _changed(self, change: Callable[[Problem], Problem]) -> Priced:
        inner = self.build
        build = None if inner is None else lambda graph, **how: change(inner(graph, **how))
        return dataclasses.replace(self, first=change(self.first), build=build)

    def at(self, samples: int) -> Problem:
        """Returns the problem for a number of samples.

        Raises:
            InputError: The model has a fixed batch.
        """
        assert self.build is not None and self.graph_at is not None
        problem = self.build(self.graph_at(samples))
        if problem.samples_per_microbatch != samples:
            raise InputError(
                f"batch: the model was asked for a batch of {samples} samples and has one of "
                f"{problem.samples_per_microbatch}; let its function take a parameter batch"
            )
        return problem


def place_priced(
    priced: Priced, *, planner: str = "agent", seed: int = 0, time_limit_s: float | None = None, **options: Any
) -> Placed:
    """Runs a planner on a priced input; its answer is simulated op by op where the graph is known.

    A plan can fit task by task and not op by op. It is then planned again with the bytes that were short held back; what was
    is in ``predicted.held_back_bytes``. When no plan fits both ways the first one is returned, and its
    ``predicted.op_level.feasible`` is false.
    """
    whole_number(seed, "seed")
    plan_of = partial(get_planner(planner), seed=seed, time_limit_s=time_limit_s, **options)
    priced = priced.prepared_for(planner)
    if priced.build is None or priced.graph is None:
        return Placed(priced.first, plan_of(priced.first), None, None)
    first: Placed | None = None
    held_back = np.zeros(priced.first.num_devices, dtype=np.int64)
    for _ in range(1 + OP_LEVEL_TRIES):
        try:
            problem = priced.holding_back(held_back).first
            plan = plan_of(problem)
        except InfeasibleError:
            if first is None:
                raise
            break
        op_problem = priced.build(priced.graph, level="op")
        if held_back.any():
            problem = priced.first
            plan = _moved_to(plan, problem, held_back)
        placed = Placed(problem, with_op_level(plan, problem, op_problem), op_problem, priced.graph)
        first = first or placed
        op_level = placed.plan.predicted.op_level
        assert op_level is not None
        over = np.maximum(np.asarray(op_level.peak_memory_bytes) - problem.capacity_bytes, 0.0)
        if op_level.feasible or not over.any():
            return placed
        held_back += np.ceil(1.05 * over).astype(np.int64)
    assert first is not None
    return first


def _moved_to(plan: PlacementPlan, problem: Problem, held_back: NDArray[np.int64]) -> PlacementPlan:
    """Returns a plan that was made with part of the memory held back, as a plan for the problem itself."""
    from rlplace.simulator import simulate

    plan = dataclasses.replace(plan, problem=problem.fingerprint)
    predicted = plan.predicted.with_simulation(simulate(problem, plan).predicted(problem))
    return plan.with_predicted(predicted.replace(held_back_bytes=tuple(held_back.tolist())))


def with_op_level(plan: PlacementPlan, problem: Problem, op_problem: Problem) -> PlacementPlan:
    """Returns the plan with ``predicted.op_level``: step time and peaks when every captured op is simulated on its own.

    Args:
        plan: A plan for `problem`.
        problem: The problem at task level.
        op_problem: The same graph, cluster and groups at op level.
    """
    from rlplace.simulator import simulate

    check_plan(plan, problem)
    if op_problem.group_names != problem.group_names:
        raise InputError("the op-level problem has other groups than the plan's problem")
    # Priorities and orders name tasks, so op by op the default priority decides.
    fine = dataclasses.replace(plan, problem=op_problem.fingerprint, priority=None, order=None)
    predicted = simulate(op_problem, fine).predicted(op_problem)
    kept = Prediction(predicted.step_time_s, peak_memory_bytes=predicted.peak_memory_bytes, feasible=predicted.feasible)
    return plan.with_predicted(plan.predicted.replace(op_level=kept))
