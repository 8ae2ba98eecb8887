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
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlplace.errors import whole_number
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import one_shot
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.common.subsets import device_order, device_subsets
from rlplace.placement.published.bipartition.layers import Layers, layer_orders, make_layers, make_pipeline, require_split
from rlplace.placement.published.bipartition.solve import Cuts, bi_partition, bottleneck_s, layer_wise, least_traffic
from rlplace.placement.published.bipartition.straight import straight_pipelines
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem

GAP = 8
"""Default for the layers that a forward cut and its backward cut may be apart."""

GAPS = (0, 1, 2, 4)
"""Smaller gaps that are tried as well: the simulator knows more than the chain, and displaced layers may not pay."""

MAX_COUNTS = 5
"""Numbers of devices that are tried, the full one among them."""

CHOICES = ((1.0, False), (1.0, True), (1.1, False))
"""Bottlenecks allowed, as multiples of the optimum, and whether loads are then as even or traffic as small as possible."""


def bipartition(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, gap: int = GAP) -> PlacementPlan:
    """The best pipeline with separate forward and backward cuts; see the module docstring.

    Args:
        problem: A split problem (`rlplace.cost.split.split_backward`); the plan refers to it.
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

    def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
        for layers, cuts in _pipelines(problem, int(gap)):
            yield layers.assign(problem, cuts)
        yield from straight_pipelines(problem)

    plan = one_shot(problem, "bipartition", candidates, seed=seed, time_limit_s=time_limit_s)
    return plan.with_predicted(plan.predicted.told(bipartition=chain_gain(problem, int(gap))))


def _pipelines(problem: Problem, gap: int) -> Iterator[tuple[Layers, Cuts]]:
    gaps = sorted({gap, *(smaller for smaller in GAPS if smaller < gap)})
    subsets = device_subsets(problem)
    kept = np.unique(np.geomspace(1, len(subsets), MAX_COUNTS).round().astype(int)) - 1
    for subset in (subsets[i] for i in kept[::-1]):
        for order in layer_orders(problem):
            layers = make_layers(problem, order, subset)
            for cuts in _cuts(problem, layers, gaps):
                yield layers, cuts


def _cuts(problem: Problem, layers: Layers, gaps: list[int]) -> Iterator[Cuts]:
    """Distinct cuts, smallest gap first; without memory limits where those leave none, for the repair to work on."""
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
    """The layer-wise optimum of the chain on all devices against the one with a gap, without communication and memory."""
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
