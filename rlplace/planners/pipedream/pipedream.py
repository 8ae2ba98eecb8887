"""PipeDream's partitioner: consecutive stages, each on one device, the slowest stage as quick as it can be.

Problem: throughput of a pipeline in steady state. With layers in topological order, ``A[j][k]`` is the time of the slowest
stage or hand-over when the first j layers run on k devices: the minimum over cuts of the layers before.

Graphs that branch are cut between states: sets of layers closed under what feeds them, where there are at most `MAX_STATES`.

Paper: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019.

Departures: stages are not replicated. A `PlacementPlan` cannot hold stages with replicas of their own; a strategy can
(`rlplace.strategy.published`). The released code charges activations only when told their compression ratio; here straight
pipelines are built both ways. Steps are synchronous, so weights have one version. The simulator picks among numbers of devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.bipartition.layers import Layers, layer_orders, make_layers, make_pipeline, pipeline_execution
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.subsets import device_subsets, map_parts
from rlplace.planners.pipedream import kernels
from rlplace.planners.pipedream.stages import States, branch_states, chain_states
from rlplace.problem import Problem
from rlplace.schedule import ONE_F_ONE_B

execution = pipeline_execution
"""Several micro-batches run with `1f1b` unless told otherwise."""


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
