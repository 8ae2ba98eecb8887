"""Bi-Partition: a pipeline whose forward and backward passes are cut at different layers.

Problem: throughput of pipelined training in steady state. A layer-wise cut cannot balance layers of very different cost;
with cuts of their own for the forward and the backward pass every worker's total can be nearly equal.

Paper: Cui, Qu, Zhang, Tang, Ye, "A bidirectional DNN partition mechanism for efficient pipeline parallel training in cloud",
Journal of Cloud Computing 12:22, 2023. From the paper: the idea, the objective and the baseline, PipeDream; its headline is up
to 1.9 times PipeDream's training efficiency. The rest is reconstruction: the cost model (displaced layers, whose two passes run
on different workers, pay for shipping what the backward pass reads and for returning weights, and count twice in memory), the
dynamic programme with and without a gap limit, and the bisection (`rlplace.placement.published.bipartition.solve`).

Departures: updates are synchronous, once a step, so weights have one version, where PipeDream keeps a version for each
mini-batch in flight; a placement is one pass of the batch, where the paper asks for throughput; a general graph is made a chain
(`rlplace.placement.published.bipartition.layers`); the simulator picks among cuts for gaps up to the one asked for, with the
smallest bottleneck or a little more, least traffic or most even loads.

Layer-wise pipelines of a chain of layers, for 1 to D devices: the exact cut with the smallest largest stage, with and without
what is sent over cuts (Narayanan et al., "PipeDream", SOSP 2019). Layers hold what belongs together, a forward group and its
backward among it. The planner `balanced` has these cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations, product
from typing import Any

import numpy as np

from rlplace.errors import whole_number
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_classes, device_order, device_subsets, one_shot_planner
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.published.bipartition.layers import Layers, layer_orders, make_layers, make_pipeline, require_split
from rlplace.placement.published.bipartition.solve import (
    Chain,
    PassCuts,
    Workers,
    bi_partition,
    bottleneck_s,
    layer_wise,
    least_traffic,
)
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem

MAX_LAYERS = 512
"""Most layers of a chain; neighbours are merged beyond."""

MAX_ORDERS = 2
"""Orders of the classes of unlike devices that are tried."""


def straight_pipelines(problem: Problem, slacks: Sequence[float] = (1.0,)) -> Iterator[Assignment | None]:
    """Yields layer-wise cuts for every number of devices and order, of unlike devices also in other orders of their classes;
    None after a piece of the work.

    Where memory limits leave no cuts, only resident bytes count, and then nothing: the repair has to do the rest.

    Args:
        problem: The problem.
        slacks: Largest stages allowed, as multiples of the smallest possible; the cuts of each have the least traffic.
    """
    for subset in reversed(device_subsets(problem)):
        for devices, order in product(_class_orders(problem, subset), layer_orders(problem)):
            layers = make_layers(problem, order, devices, max_layers=MAX_LAYERS)
            yield None
            for sends in (True, False):
                for chain, workers in _relaxed(layers.chain, make_pipeline(problem, devices), sends):
                    bound = bottleneck_s(chain, workers, 0)
                    if bound < np.inf:
                        for slack in slacks if sends else slacks[:1]:
                            cuts = least_traffic(chain, workers, bound * slack, 0)
                            assert cuts is not None
                            yield layers.assign(problem, cuts)
                        break


def _class_orders(problem: Problem, devices: list[int]) -> Iterator[list[int]]:
    """Yields the given order, by classes of like devices, and some other orders of the classes."""
    for classes in islice(permutations(device_classes(problem, devices)), MAX_ORDERS):
        yield [device for members in classes for device in members]


def _relaxed(chain: Chain, workers: Workers, sends: bool) -> Iterator[tuple[Chain, Workers]]:
    """Yields a chain on workers, with or without what is sent: within memory, then without activations, then without limits."""
    if not sends:
        workers = replace(workers, seconds_per_byte=np.zeros(workers.count))
    yield chain, workers
    yield replace(chain, stash_bytes=np.zeros(chain.num_layers)), workers
    yield chain, replace(workers, memory_bytes=np.full(workers.count, np.inf))


GAP = 8
"""Default for the layers that a forward cut and its backward cut may be apart."""

GAPS = (0, 1, 2, 4)
"""Smaller gaps that are tried as well: the simulator knows more than the chain, and displaced layers may not pay."""

MAX_COUNTS = 5
"""Numbers of devices that are tried, the full one among them."""

CHOICES = ((1.0, False), (1.0, True), (1.1, False))
"""Bottlenecks allowed, as multiples of the optimum, and whether loads are then as even or traffic as small as possible."""


def bipartition(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, gap: int = GAP) -> PlacementPlan:
    """Returns the best pipeline with separate forward and backward cuts; see the module docstring.

    Args:
        problem: A split problem (`rlplace.cost.contract.split_backward`); the plan refers to it.
        seed: Unused: nothing is random.
        time_limit_s: Wall time.
        gap: Layers that a forward cut and its backward cut may be apart; 0: the layer-wise pipeline.

    Returns:
        The plan; ``predicted.bipartition`` compares the two optima of the chain without communication.

    Raises:
        InputError: The problem is not split, or the gap is no whole number from 0 up.
        InfeasibleError: No plan fits.
    """
    require_split(problem, "bipartition")
    whole_number(gap, "bipartition: gap")

    plan = _pipelines(problem, seed=seed, time_limit_s=time_limit_s, gap=int(gap))
    return plan.with_predicted(plan.predicted.replace(bipartition=chain_gain(problem, int(gap))))


@one_shot_planner("bipartition")
def _pipelines(problem: Problem, seed: int, *, gap: int) -> Iterator[Assignment | None]:
    del seed
    gaps = sorted({gap, *(smaller for smaller in GAPS if smaller < gap)})
    subsets = device_subsets(problem)
    kept = np.unique(np.geomspace(1, len(subsets), MAX_COUNTS).round().astype(int)) - 1
    for subset in (subsets[i] for i in kept[::-1]):
        for order in layer_orders(problem):
            layers = make_layers(problem, order, subset)
            for cuts in _cuts(problem, layers, gaps):
                yield layers.assign(problem, cuts)
    yield from straight_pipelines(problem)


def _cuts(problem: Problem, layers: Layers, gaps: list[int]) -> Iterator[PassCuts]:
    """Yields distinct cuts, smallest gap first; without memory limits where those leave none, for the repair to work on."""
    seen = set()
    for limited in (True, False):
        pipeline = make_pipeline(problem, layers.devices, limited=limited)
        bound = np.inf
        for gap in gaps:
            before, bound = bound, bottleneck_s(layers.chain, pipeline, gap, known_s=bound)
            # Where a larger gap does not lower the bottleneck, which transfers may set, it can still even out the rest.
            for slack, even in CHOICES if bound < before else CHOICES[1:2] if bound < np.inf else ():
                cuts = least_traffic(layers.chain, pipeline, bound * slack, gap, even=even)
                if cuts is not None and (cuts.forward, cuts.backward) not in seen:
                    seen.add((cuts.forward, cuts.backward))
                    yield cuts
        if seen:
            return


def chain_gain(problem: Problem, gap: int) -> dict[str, Any]:
    """Returns the layer-wise optimum of the chain on all devices against the one with a gap, without communication and
    memory.
    """
    devices = device_order(problem)
    layers = make_layers(problem, group_graph(problem).order, devices)
    plain, apart = layer_wise(layers.chain, len(devices)), bi_partition(layers.chain, len(devices), gap)
    assert plain is not None and apart is not None  # without memory limits there is always one
    return {
        "layers": layers.chain.num_layers,
        "gap": apart.gap,
        "displaced_layers": len(apart.displaced),
        "bottleneck_s": apart.bottleneck_s,
        "layer_wise_bottleneck_s": plain.bottleneck_s,
    }
