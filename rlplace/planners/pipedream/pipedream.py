"""PipeDream's partitioner: consecutive stages, each on one device or replicated, the slowest stage as quick as it can be.

Problem: throughput of a pipeline in steady state. With layers in topological order, ``A[i..j][m]`` is the time of the slowest
stage when the layers i to j run on m machines:

    stage(i..j, m) = (C_ij + 4 (m - 1) W_ij / (B m)) / m
    A[i..j][m]     = min over cuts k, replicas r < m of max(A[i..k][m - r], stage(k+1..j, r), 2 a_k / (B r))

with C the compute seconds of a micro-batch, W the weights, a_k the activations at the cut (as large as their gradients) and B
the bandwidth. Graphs that branch are cut between states: sets of layers closed under what feeds them, where there are at most
`MAX_STATES`. Devices in hosts are solved host by host: the result inside a host is the compute time one level up.

Paper: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019; formulas and the memory
test as in its repository msr-fiddle/pipedream.

Departures: a `PlacementPlan` copies whole pipelines, not single stages. The plan is the best straight pipeline (no stage
replicated), or, when asked for, the best uniformly replicated one at equal samples; the optimum with replicas of every stage is
reported in ``predicted.pipedream``. The memory test counts a stage itself among the machines behind it: the released code
does not, which leaves the last stage without any memory need. The released code charges activations only when told their
compression ratio; here they always count, and straight pipelines are built both ways. A machine may stay unused.
Steps are synchronous, so weights have one version. The simulator picks among numbers of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError, InputError, whole_number
from rlplace.plan import PlacementPlan
from rlplace.planners.bipartition.layers import Layers, layer_orders, make_layers, make_pipeline, pipeline_execution
from rlplace.planners.common.evaluate import Assignment, Deadline
from rlplace.planners.common.floor import one_shot
from rlplace.planners.common.subsets import device_classes, device_subsets, map_parts
from rlplace.planners.pipedream import kernels
from rlplace.planners.pipedream.copies import exchanges_gradients, problem_of_replica, replicated_plan
from rlplace.planners.pipedream.stages import States, branch_states, chain_states, replicated_optimum
from rlplace.problem import Problem
from rlplace.schedule import ONE_F_ONE_B


def pipedream(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    microbatches: int = 1,
    schedule: str | None = None,
    replicas: int | None = 1,
) -> PlacementPlan:
    """The best straight or uniformly replicated pipeline; see the module docstring.

    Args:
        problem: Split or not: a layer's passes sit on one device either way.
        seed: Unused: nothing is random.
        time_limit_s: Wall time.
        microbatches: Micro-batches of a step, those of all replicas together.
        schedule: Default `1f1b` when there are several micro-batches and stages form no cycle, else `list`.
        replicas: Copies of the pipeline; each runs its share of the micro-batches. None: as many as make the step shortest.

    Returns:
        The plan; ``predicted.pipedream`` holds the optimum with replicated stages.

    Raises:
        InputError: The replicas do not share out the devices and micro-batches, or are no copies of each other.
        InfeasibleError: No plan fits.
    """
    if replicas is not None:
        whole_number(replicas, "pipedream: replicas", 1)
    deadline = Deadline(time_limit_s)
    counts = range(1, problem.num_devices + 1) if replicas is None else (replicas,)
    best: PlacementPlan | None = None
    reason: InfeasibleError | None = None
    for count in counts:
        if replicas is None and (problem.num_devices % count or microbatches % count or (count > 1 and not _copies(problem))):
            continue
        if best is not None and deadline.passed():
            break
        try:
            pipeline = _uniform(problem, count, microbatches, schedule, seed, _left_s(deadline))
        except InfeasibleError as error:
            reason = reason or error
            continue
        if best is None or pipeline.predicted.step_s < best.predicted.step_s:
            best = pipeline
    if best is None:
        assert reason is not None
        raise reason
    report = replicated_optimum(problem, microbatches)
    return best.with_predicted(best.predicted.told(pipedream=report))


def _left_s(deadline: Deadline) -> float | None:
    left = deadline.left_s()
    return None if left == float("inf") else max(left, 0.0)


def _copies(problem: Problem) -> bool:
    """Whether whole pipelines can be copied: devices alike, and gradients of known size."""
    return len(device_classes(problem)) == 1 and exchanges_gradients(problem)


def _uniform(
    problem: Problem, replicas: int, microbatches: int, schedule: str | None, seed: int, time_limit_s: float | None
) -> PlacementPlan:
    """The best pipeline in so many copies, simulated with its gradient exchange."""
    if replicas == 1:
        run = pipeline_execution(problem, microbatches, schedule)
        return one_shot(problem, "pipedream", partial(candidates, **run), seed=seed, time_limit_s=time_limit_s, **run)
    if problem.num_devices % replicas or microbatches % replicas:
        raise InputError(
            f"pipedream: {replicas} replicas cannot share out {problem.num_devices} devices and {microbatches} micro-batches "
            "evenly; use a number that divides both"
        )
    if not _copies(problem):
        raise InputError(
            "pipedream: replicas need devices that are all alike and groups that say how large their gradients are"
        )
    share = problem.num_devices // replicas
    rows = [list(range(r * share, (r + 1) * share)) for r in range(replicas)]
    first = problem_of_replica(problem, tuple(rows[0]))
    plan = _uniform(first, 1, microbatches // replicas, schedule, seed, time_limit_s)
    return replicated_plan(problem, plan, rows, "use fewer replicas of pipedream's plan")


def candidates(problem: Problem, seed: int, *, microbatches: int = 1, schedule: str = ONE_F_ONE_B) -> Iterator[Assignment]:
    """Straight pipelines over 1 to D devices, on chains and where possible on branches, with and without communication."""
    del seed
    for subset in reversed(device_subsets(problem)):
        for order in layer_orders(problem):
            layers = make_layers(problem, order, subset, microbatches=microbatches)
            yield from _straight(problem, layers, chain_states(layers), microbatches, schedule)
        branches = branch_states(problem, layers) if layers.chain.num_layers > 1 else None
        if branches is not None and branches.count > layers.chain.num_layers + 1:
            yield from _straight(problem, layers, branches, microbatches, schedule)


def _straight(problem: Problem, layers: Layers, states: States, microbatches: int, schedule: str) -> Iterator[Assignment]:
    for communication in (True, False):
        for limited in (True, False):
            workers = make_pipeline(problem, layers.devices, microbatches=microbatches, schedule=schedule, limited=limited)
            inverse = workers.seconds_per_byte if communication else np.zeros(workers.count)
            best = np.empty((workers.count + 1, states.count))
            origin = np.zeros((workers.count + 1, states.count), dtype=np.int64)
            kernels.straight(
                states.inside, states.time_s, states.crossing_bytes, states.resident_bytes, states.stash_bytes, inverse,
                workers.memory_bytes, workers.in_flight, best, origin,
            )  # fmt: skip
            if best[-1, -1] < np.inf:
                stage = stage_of_layer(states, origin)
                yield map_parts(problem, stage[layers.layer_of_group], layers.devices)
                break


def stage_of_layer(states: States, origin: NDArray[np.int64]) -> NDArray[np.int32]:
    """int32 [L], the stage of every layer, from the table of `kernels.straight`."""
    stage = np.zeros(states.member.shape[1], dtype=np.int32)
    state = states.count - 1
    for k in range(len(origin) - 1, 0, -1):
        before = int(origin[k, state])
        stage[states.member[state] & ~states.member[before]] = k - 1
        state = before
    return stage
