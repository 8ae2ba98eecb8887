"""`rlplace.place`: from a model, a graph or a problem to a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, show
from rlplace.plan.plan import PlacementPlan, check_plan
from rlplace.planners import get_planner
from rlplace.problem import Problem

if TYPE_CHECKING:
    from torch import nn

    from rlplace.cluster.spec import Cluster
    from rlplace.graph.opgraph import OpGraph


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
    groups: int = 200,
    global_batch: int | None = None,
    **options: Any,
) -> PlacementPlan:
    """Plans where every group of a training step runs.

    Args:
        target: A problem; or a captured graph or a module, which are priced for `cluster`.
        cluster: A `Cluster`, or its text such as ``"a100-80g:4"``; not with a problem, which has its devices.
        planner: Name of a planner.
        time_limit_s: Wall time of the planner; capture and pricing come on top.
        seed: Seed of everything random.
        example_inputs: For a module: its arguments as a tuple, or a dict of keyword arguments.
        loss: For a module: maps its output to the scalar loss; default ``output.loss``.
        optimizer: For a module: decides the optimizer state.
        groups: Target number of groups.
        global_batch: Samples per step. One micro-batch is planned, so it must be the captured batch.
        **options: Options of the planner, for example ``calls=256``.

    Returns:
        A feasible plan. When the graph is known, ``predicted["op_level"]`` holds the same plan simulated op by op.

    Raises:
        InfeasibleError: No plan fits.
    """
    function = get_planner(planner)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed: expected a whole number from 0 up, found {show(seed)}")
    if isinstance(target, Problem):
        if cluster is not None:
            raise InputError("a problem has its own devices; leave cluster out, or place the model")
        _check_batch(global_batch, target.samples_per_microbatch)
        return function(target, seed=seed, time_limit_s=time_limit_s, **options)
    from rlplace.cluster.parse import as_cluster
    from rlplace.cost.price import price
    from rlplace.graph.opgraph import OpGraph

    if cluster is None:
        raise InputError("place needs a cluster for a model, for example cluster='a100-80g:4'")
    machine = as_cluster(cluster)
    if isinstance(target, OpGraph):
        graph = target
    else:
        from rlplace.graph.capture import capture

        if example_inputs is None:
            raise InputError("place needs example_inputs for a module: a tuple of arguments or a dict of keyword arguments")
        graph = capture(target, example_inputs, loss=loss, optimizer=optimizer)
    _check_batch(global_batch, graph.samples)
    problem = price(graph, machine, groups=groups)
    plan = function(problem, seed=seed, time_limit_s=time_limit_s, **options)
    return with_op_level(plan, problem, price(graph, machine, groups=groups, level="op"))


def with_op_level(plan: PlacementPlan, problem: Problem, op_problem: Problem) -> PlacementPlan:
    """The plan with ``predicted["op_level"]``: step time and peaks when every captured op is simulated on its own.

    Args:
        plan: A plan for `problem`.
        problem: The problem at task level.
        op_problem: The same graph, cluster and groups at op level.
    """
    from rlplace.simulator import simulate

    check_plan(plan, problem)
    if op_problem.group_names != problem.group_names:
        raise InputError("the op-level problem has other groups than the plan's problem")
    predicted = simulate(op_problem, plan.device_of_group).predicted(op_problem)
    kept = {key: predicted[key] for key in ("step_time_s", "peak_memory_bytes", "feasible")}
    return plan.with_predicted({**plan.predicted, "op_level": kept})


def _check_batch(global_batch: int | None, samples: int) -> None:
    if global_batch is not None and global_batch != samples:
        raise InputError(
            f"global batch {global_batch} differs from the captured batch of {samples} samples; this version plans one "
            f"micro-batch per step: capture the model at batch {global_batch}"
        )
