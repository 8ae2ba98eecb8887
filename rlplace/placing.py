"""`rlplace.place`: from a model, a graph or a problem to a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError, InputError, whole_number
from rlplace.graph.rescale import rescale, two_captures
from rlplace.plan.plan import PlacementPlan, check_plan
from rlplace.plan.prediction import Prediction
from rlplace.planners import NEEDS_SHARDING, NEEDS_SPLIT, get_planner
from rlplace.problem import Problem

if TYPE_CHECKING:
    from torch import nn

    from rlplace.cluster.parse import Cluster
    from rlplace.graph.opgraph import OpGraph
    from rlplace.planners.strategy.efficiency import BatchCurve
    from rlplace.strategy.space import Space


def place(
    target: Problem | OpGraph | nn.Module,
    cluster: Cluster | str | None = None,
    *,
    planner: str = "agent",
    time_limit_s: float | None = 5.0,
    seed: int = 0,
    example_inputs: Any = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: str = "adam",
    batch: int | None = None,
    space: Space | str | None = None,
    calls: int | None = None,
    global_batch: int | None = None,
    batch_curve: BatchCurve | None = None,
    groups: int = 200,
    weight_gradients: bool = False,
    costs: Any = None,
    host: str = "eager",
    **options: Any,
) -> PlacementPlan:
    """Plans how a training step runs: with `batch` the whole strategy, else where every group of one micro-batch runs.

    Args:
        target: A problem; or a captured graph or a module, which are priced for `cluster`.
        cluster: A `Cluster`, or its text such as ``"a100-80g:4"``; not with a problem, which has its devices.
        planner: Name of a planner.
        time_limit_s: Wall time of the planner; capture and pricing come on top.
        seed: Seed of everything random.
        example_inputs: For a module: its arguments as a tuple, or a dict of keyword arguments.
        loss: For a module: maps its output to the scalar loss; default ``output.loss``.
        optimizer: For a module: decides the optimizer state.
        batch: Samples a step, everything together. Replicas, sharding, tensor and pipeline parallelism, micro-batches,
            schedule, recomputation and offload are then chosen together (docs/strategy.md); a graph is taken at its own
            micro-batch size, a module at any.
        space: With `batch`, what may be chosen: a `Space` or its text such as ``"tensor=1,2 sharding=0,1"``; None is all that
            the runtime can execute for this model, ``"all"`` plans also what cannot run yet.
        calls: Evaluations at most; with it and without a time limit the answer is the same from run to run.
        global_batch: Samples per step. Single device, model parallel, pipeline, data parallel and combinations are then
            compared at that batch (`rlplace.planners.strategy`). A module is priced for every micro-batch size that divides
            it, a graph or problem is taken at its own. Default: one micro-batch as given, one replica.
        batch_curve: Epochs to the target by global batch. The batch as captured is then that of one replica, and the number
            of replicas, with it the global batch, is chosen for the shortest time to the target.
        groups: Target number of groups.
        weight_gradients: See `rlplace.price`; so are `costs` and `host`.
        costs: See `weight_gradients`.
        host: See `weight_gradients`.
        **options: Options of the planner, for example ``calls=256`` or ``microbatches=4, schedule="1f1b"``.

    Returns:
        A feasible plan. When the graph is known, ``predicted.op_level`` holds the same plan simulated op by op.

    Raises:
        InfeasibleError: No plan fits.
    """
    if space is not None and batch is None:
        raise InputError("place: a space restricts whole strategies, which need the samples of a step; give batch, too")
    if batch is not None and isinstance(target, Problem):
        raise InputError("place: a problem's groups are placed one by one; leave batch out, or place the model")
    if calls is not None and batch is None:
        options["calls"] = calls
    if isinstance(target, Problem):
        if cluster is not None:
            raise InputError("a problem has its own devices; leave cluster out, or place the model")
        priced = Priced.problem(target)
    else:
        from rlplace.cluster.parse import as_cluster
        from rlplace.graph.opgraph import OpGraph

        if cluster is None:
            raise InputError("place needs a cluster for a model, for example cluster='a100-80g:4'")
        machine = as_cluster(cluster)
        if batch is not None:
            if global_batch is not None or batch_curve is not None or options or planner not in (CLASSICAL, "agent"):
                raise InputError(
                    f"place: a whole strategy is found by the planner {CLASSICAL!r}; leave global_batch, batch_curve, other "
                    "planners and their options out, or leave batch out to place groups"
                )
        module: nn.Module | None = None
        capture_at: Callable[[int], OpGraph] | None = None
        if isinstance(target, OpGraph):
            whole = target
        elif example_inputs is None:
            raise InputError("place needs example_inputs for a module: a tuple of arguments or a dict of keyword arguments")
        else:
            from rlplace.graph.capture import capture

            module, whole = target, capture(target, example_inputs, loss=loss, optimizer=optimizer)

            def capture_at(samples: int) -> OpGraph:
                inputs = resize_batch(example_inputs, whole.samples, samples)
                return capture(module, inputs, loss=loss, optimizer=optimizer)

        if batch is not None:
            limits = {"calls": calls, "time_limit_s": time_limit_s, "seed": seed, "costs": costs, "host": host}
            return strategy_of(whole, capture_at, machine, batch, space, limits, module, example_inputs)
        pricing = {"groups": groups, "weight_gradients": weight_gradients, "costs": costs, "host": host}
        if capture_at is None:
            priced = Priced.graph(whole, machine, **pricing)
        else:
            priced = Priced.model(whole, capture_at, machine, **pricing)
    return place_priced(
        priced, planner=planner, seed=seed, time_limit_s=time_limit_s, global_batch=global_batch, batch_curve=batch_curve,
        **options,
    ).plan  # fmt: skip


CLASSICAL = "strategy"
"""Name of the planner of whole strategies."""

EVERYTHING = "all"
"""Text of the space that plans also what cannot run yet."""


def strategy_of(
    graph: OpGraph,
    capture_at: Callable[[int], OpGraph] | None,
    cluster: Cluster,
    batch: int,
    space: Space | str | None,
    limits: dict[str, Any],
    module: nn.Module | None = None,
    inputs: Any = None,
) -> PlacementPlan:
    """The whole strategy for a captured model.

    Args:
        graph: The model, captured.
        capture_at: Captures it with so many samples; None: it has this micro-batch size only.
        cluster: The devices.
        batch: Samples a step.
        space: See `place`.
        limits: Arguments of `rlplace.strategy.plan.plan_strategy`.
        module: The model, for what the runtime can execute; None asks it about the strategy alone.
        inputs: Its keyword inputs; with others it is asked about the names of its modules only.
    """
    from rlplace.strategy.plan import plan_strategy
    from rlplace.strategy.space import Space

    whole_number(batch, "place: batch", 1, 1 << 24)
    why_not, only = None, None
    if space != EVERYTHING:
        from rlplace.runtime.native.facts import what_runs

        why_not, only = what_runs(module, inputs)
    allowed = space if isinstance(space, Space) else Space.parse(space) if space not in (None, EVERYTHING) else None
    graph, other = (graph, None) if capture_at is None else two_captures(graph, capture_at)
    return plan_strategy(graph, cluster, batch, other=other, space=allowed, why_not=why_not, only=only, **limits)


OP_LEVEL_TRIES = 3
"""Times that planning starts again because the plan does not fit op by op."""

CUT = "cut"
"""Level of pricing: op by op, with the dimensions along which ops can be cut."""


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
        build: Prices a graph at level "task", "op", or `CUT`: op by op, with what planners that cut ops need.
        level: What is placed, "task" or `CUT`.
    """

    first: Problem
    samples: int | None
    graph_of: Callable[[int], OpGraph] | None = None
    build: Callable[[OpGraph, str], Problem] | None = None
    level: str = "task"
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

        Captured twice, it is known at all sizes (`rlplace.graph.rescale`); the second capture is made when it is needed. A
        model whose two captures differ in structure is captured at every size.

        Args:
            whole: The model, captured.
            capture_at: Captures it with so many samples.
            cluster: The devices and links.
            **pricing: Arguments of `rlplace.price`.
        """
        return _priced(whole, None, _Graphs(whole, capture_at), cluster, pricing)

    def prepared_for(self, planner: str) -> Priced:
        """The same for a planner that wants the backward of groups apart, or ops that can be cut; else as it is."""
        if planner in NEEDS_SHARDING and self.level != CUT and self.build is not None and self.graph_of is not None:
            graph = self.graph_of(self.first.samples_per_microbatch)
            return dataclasses.replace(self, first=self.build(graph, CUT), level=CUT, _kept={})
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
            problem = self.build(self.graph_of(samples), self.level)
            if self.samples is None and problem.samples_per_microbatch != samples:
                raise InputError(
                    f"global_batch: the model was asked for a batch of {samples} samples and has one of "
                    f"{problem.samples_per_microbatch}; let its function take a parameter batch, or leave global_batch out"
                )
            self._kept[samples] = problem
        return self._kept[samples]


def _priced(
    first: OpGraph, samples: int | None, graph_of: Callable[[int], OpGraph], cluster: Cluster, pricing: dict[str, Any]
) -> Priced:
    from rlplace.cost.price import price

    def build(graph: OpGraph, level: str) -> Problem:
        how = {"level": "op", "sharding": True} if level == CUT else {"level": level}
        return price(graph, cluster, **how, **pricing)

    return Priced(build(first, "task"), samples, graph_of, build)


class _Graphs:
    """The graphs of a model by batch size."""

    def __init__(self, whole: OpGraph, capture_at: Callable[[int], OpGraph]) -> None:
        self._capture_at = capture_at
        self._kept = {whole.samples: whole}
        self._pair: tuple[OpGraph, OpGraph] | None = None
        self._whole = whole

    def __call__(self, samples: int) -> OpGraph:
        if samples not in self._kept:
            self._kept[samples] = self._graph(samples)
        return self._kept[samples]

    def _graph(self, samples: int) -> OpGraph:
        if samples == 1:  # a batch of one takes paths of its own: dimensions of size one broadcast
            return self._capture_at(1)
        if self._pair is None:
            whole, other = two_captures(self._whole, self._capture_at)
            self._pair = (other, whole) if other.samples < whole.samples else (whole, other)
        try:
            return rescale(*self._pair, samples)
        except InputError:
            return self._capture_at(samples)


def plan_priced(
    priced: Priced,
    *,
    planner: str = "agent",
    seed: int = 0,
    time_limit_s: float | None = None,
    global_batch: int | None = None,
    batch_curve: BatchCurve | None = None,
    **options: Any,
) -> tuple[Problem, PlacementPlan]:
    """Runs a planner on what is priced; the problem at the micro-batch size that was chosen, and its plan. See `place`."""
    function = get_planner(planner)
    whole_number(seed, "seed")
    priced = priced.prepared_for(planner)
    if global_batch is None and batch_curve is None:
        return priced.first, function(priced.first, seed=seed, time_limit_s=time_limit_s, **options)
    from rlplace.planners.strategy.choices import MAX_GLOBAL_BATCH
    from rlplace.planners.strategy.sweep import place_strategies

    given = "a global batch" if batch_curve is None else "a batch curve"
    if batch_curve is not None and global_batch is not None:
        raise InputError("a batch curve chooses the global batch; leave global_batch out, or the curve")
    if batch_curve is None:
        whole_number(global_batch, "global_batch", 1, MAX_GLOBAL_BATCH)
    fixed = sorted({"microbatches", "schedule"} & set(options))
    if fixed:
        raise InputError(f"{given} chooses {' and '.join(fixed)} itself; leave one of them out")
    if planner in NEEDS_SHARDING:
        raise InputError(f"planner {planner} cuts the ops of one batch over all devices; leave {given} out and set the batch")
    return place_strategies(
        priced.at, first=priced.first, global_batch=global_batch, curve=batch_curve, samples=priced.samples, planner=planner,
        seed=seed, time_limit_s=time_limit_s, **options,
    )  # fmt: skip


def place_priced(priced: Priced, *, planner: str = "agent", **arguments: Any) -> Placed:
    """`plan_priced`, and its answer simulated op by op where the graph is known.

    A plan can fit task by task and not op by op. It is then planned again with the bytes that were short held back; what was
    is in ``predicted.held_back_bytes``. When no plan fits both ways the first one is returned, and its
    ``predicted.op_level.feasible`` is false.
    """
    get_planner(planner)
    priced = priced.prepared_for(planner)
    if priced.build is None or priced.graph_of is None or priced.level == CUT:  # cut ops are simulated one by one already
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


def resize_batch(inputs: Any, samples: int, wanted: int) -> Any:
    """Example inputs with another batch size: every tensor whose first dimension is `samples` is cut or repeated.

    Args:
        inputs: Tensors in tuples, lists and dicts.
        samples: Batch size of `inputs`.
        wanted: Batch size of the result.
    """
    import torch

    if isinstance(inputs, torch.Tensor):
        if inputs.dim() == 0 or inputs.shape[0] != samples:
            return inputs
        repeats = -(-wanted // samples)
        return inputs.repeat(repeats, *([1] * (inputs.dim() - 1)))[:wanted]
    if isinstance(inputs, dict):
        return {key: resize_batch(value, samples, wanted) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(resize_batch(value, samples, wanted) for value in inputs)
    return inputs
