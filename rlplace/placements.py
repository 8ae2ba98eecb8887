"""The question of placements: which device every group of one micro-batch runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError, InputError, whole_number
from rlplace.graph.sizes import Graphs
from rlplace.plan.plan import PlacementPlan, check_plan
from rlplace.plan.prediction import Prediction
from rlplace.planners import NEEDS_SPLIT, get_planner
from rlplace.problem import Problem

if TYPE_CHECKING:
    from rlplace.cluster.parse import Cluster
    from rlplace.graph.opgraph import OpGraph


OP_LEVEL_TRIES = 3
"""Times that planning starts again because the plan does not fit op by op."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A plan and the problem that it solves.

    Attributes:
        problem: At task level.
        plan: The plan.
        op_problem: The problem at op level; None when only a problem was given.
        graph: The graph of one micro-batch; likewise.
    """

    problem: Problem
    plan: PlacementPlan
    op_problem: Problem | None
    graph: OpGraph | None


@dataclass(frozen=True, eq=False)
class Priced:
    """What is placed: a problem, or a graph that can be priced for one or for any micro-batch size.

    Attributes:
        first: The problem as given, at task level.
        samples: The only micro-batch size there is, None where any can be priced.
        graph_of: The graph for a micro-batch size; None when only a problem was given.
        build: Prices a graph at level "task" or "op".
    """

    first: Problem
    samples: int | None
    graph_of: Callable[[int], OpGraph] | None = None
    build: Callable[[OpGraph, str], Problem] | None = None
    _kept: dict[int, Problem] = field(default_factory=dict)

    @staticmethod
    def problem(problem: Problem) -> Priced:
        """A problem without its graph."""
        return Priced(problem, problem.samples_per_microbatch)

    @staticmethod
    def graph(graph: OpGraph, cluster: Cluster, **pricing: Any) -> Priced:
        """One captured graph; its batch is the micro-batch. `pricing` holds arguments of `rlplace.price`."""
        return _priced(graph, graph.samples, lambda samples: graph, cluster, pricing)

    @staticmethod
    def model(whole: OpGraph, capture_at: Callable[[int], OpGraph], cluster: Cluster, **pricing: Any) -> Priced:
        """A model that can be captured at any batch size.

        Args:
            whole: The model, captured.
            capture_at: Captures it with so many samples.
            cluster: The devices and links.
            **pricing: Arguments of `rlplace.price`.
        """
        return _priced(whole, None, Graphs(whole, capture_at), cluster, pricing)

    def prepared_for(self, planner: str) -> Priced:
        """The same for a planner that wants the backward of groups apart; else as it is."""
        if planner in NEEDS_SPLIT:
            from rlplace.cost.split import split_backward
            from rlplace.planners.bipartition.layers import is_split

            if is_split(self.first):
                return self
            inner = self.build
            build = None if inner is None else lambda graph, level: split_backward(inner(graph, level))
            return dataclasses.replace(self, first=split_backward(self.first), build=build, _kept={})
        return self

    def holding_back(self, size_bytes: NDArray[np.int64]) -> Priced:
        """The same with so much less memory on every device, int64 [D]."""
        if not size_bytes.any():
            return self
        inner = self.build

        def less(problem: Problem) -> Problem:
            devices = tuple(
                device
                if device.memory_bytes is None
                else dataclasses.replace(device, memory_bytes=max(device.memory_bytes - n, 0))
                for device, n in zip(problem.devices, size_bytes.tolist(), strict=True)
            )
            return dataclasses.replace(problem, devices=devices)

        build = None if inner is None else lambda graph, level: less(inner(graph, level))
        return dataclasses.replace(self, first=less(self.first), build=build, _kept={})

    def at(self, samples: int) -> Problem:
        """The problem for a micro-batch of so many samples."""
        if samples == self.first.samples_per_microbatch or self.build is None or self.graph_of is None:
            return self.first
        if samples not in self._kept:
            problem = self.build(self.graph_of(samples), "task")
            if self.samples is None and problem.samples_per_microbatch != samples:
                raise InputError(
                    f"batch: the model was asked for a batch of {samples} samples and has one of "
                    f"{problem.samples_per_microbatch}; let its function take a parameter batch"
                )
            self._kept[samples] = problem
        return self._kept[samples]


def _priced(
    first: OpGraph, samples: int | None, graph_of: Callable[[int], OpGraph], cluster: Cluster, pricing: dict[str, Any]
) -> Priced:
    from rlplace.cost.price import price

    def build(graph: OpGraph, level: str) -> Problem:
        return price(graph, cluster, level=level, **pricing)

    return Priced(build(first, "task"), samples, graph_of, build)


def plan_priced(
    priced: Priced, *, planner: str = "agent", seed: int = 0, time_limit_s: float | None = None, **options: Any
) -> tuple[Problem, PlacementPlan]:
    """Runs a planner on what is priced; the problem that it solved, and its plan."""
    function = get_planner(planner)
    whole_number(seed, "seed")
    problem = priced.prepared_for(planner).first
    return problem, function(problem, seed=seed, time_limit_s=time_limit_s, **options)


def place_priced(priced: Priced, *, planner: str = "agent", **arguments: Any) -> Placed:
    """`plan_priced`, and its answer simulated op by op where the graph is known.

    A plan can fit task by task and not op by op. It is then planned again with the bytes that were short held back; what was
    is in ``predicted.held_back_bytes``. When no plan fits both ways the first one is returned, and its
    ``predicted.op_level.feasible`` is false.
    """
    get_planner(planner)
    priced = priced.prepared_for(planner)
    if priced.build is None or priced.graph_of is None:
        return Placed(*plan_priced(priced, planner=planner, **arguments), None, None)
    first: Placed | None = None
    held_back = np.zeros(priced.first.num_devices, dtype=np.int64)
    for _ in range(1 + OP_LEVEL_TRIES):
        try:
            problem, plan = plan_priced(priced.holding_back(held_back), planner=planner, **arguments)
        except InfeasibleError:
            if first is None:
                raise
            break
        graph = priced.graph_of(problem.samples_per_microbatch)
        op_problem = priced.build(graph, "op")
        if held_back.any():
            problem = priced.at(problem.samples_per_microbatch)
            plan = _moved_to(plan, problem, held_back)
        placed = Placed(problem, with_op_level(plan, problem, op_problem), op_problem, graph)
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
    """A plan that was made with part of the memory held back, as a plan for the problem itself."""
    from rlplace.simulator import simulate

    plan = dataclasses.replace(plan, problem=problem.fingerprint)
    predicted = plan.predicted.simulated(simulate(problem, plan).predicted(problem))
    return plan.with_predicted(predicted.told(held_back_bytes=tuple(held_back.tolist())))


def with_op_level(plan: PlacementPlan, problem: Problem, op_problem: Problem) -> PlacementPlan:
    """The plan with ``predicted.op_level``: step time and peaks when every captured op is simulated on its own.

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
    return plan.with_predicted(plan.predicted.told(op_level=kept))
