"""GPipe: consecutive cells of about equal cost, and micro-batches that all go forward before any goes back.

Problem: share out a chain of layers so that the cells' summed costs are as equal as they can be.

Two partitions are built. The first is that of torchgpipe: from equal numbers of layers, and costs scaled to 0..1, a largest
block p is fixed; while it exceeds the smallest block q by more than 1, the block beside q on p's side hands its nearest layer
to q; when p itself gave a layer, another largest block is fixed. It may miss the optimum. The second is the exact partition
with the smallest largest cell, by dynamic programming.

Papers: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019 (the
schedule, and cells of equal cost); Kim et al., "torchgpipe", 2020; Bárány, Grinberg, "Block partitions of sequences", 2013
(the heuristic).

Departures: costs are forward plus backward seconds from the problem instead of a profile; of the smallest blocks the one
nearest to p takes the layer, as in the block paper; partitions for 1 to D devices and two topological orders compete in the
simulator; recomputation, GPipe's default, is a plan's own field and not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.bipartition.layers import layer_orders, make_layers, make_pipeline, pipeline_execution
from rlplace.planners.bipartition.solve import Cuts, layer_wise
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.subsets import device_subsets
from rlplace.problem import Problem
from rlplace.schedule import GPIPE

MAX_LAYERS = 512
"""Layers that are told apart; neighbours are merged beyond."""


execution = partial(pipeline_execution, default=GPIPE)
"""Several micro-batches run with `gpipe` unless told otherwise."""


def candidates(problem: Problem, seed: int, *, microbatches: int = 1, schedule: str = GPIPE) -> Iterator[Assignment]:
    """Both partitions for every number of devices and order."""
    del seed
    for subset in reversed(device_subsets(problem)):
        for order in layer_orders(problem):
            layers = make_layers(problem, order, subset, microbatches=microbatches, max_layers=MAX_LAYERS)
            for limited in (True, False):
                workers = make_pipeline(problem, subset, microbatches=microbatches, schedule=schedule, limited=limited)
                exact = layer_wise(layers.chain, replace(workers, seconds_per_byte=np.zeros(workers.count)))
                if exact is not None:
                    yield layers.assign(problem, exact)
                    break
            blocks = block_partition(layers.chain.mean_s, len(subset))
            cuts = tuple(blocks) + (layers.chain.num_layers,) * (len(subset) + 1 - len(blocks))
            yield layers.assign(problem, Cuts(cuts, cuts, float("nan")))


def block_partition(costs: Sequence[float] | NDArray[np.float64], parts: int) -> list[int]:
    """The balanced partition of a sequence that torchgpipe makes.

    Args:
        costs: One number for each layer.
        parts: Blocks; no more than layers are made.

    Returns:
        Offsets of the blocks, from 0 to the number of layers. The largest block exceeds the smallest by at most the spread of
        the costs.
    """
    values = np.asarray(costs, dtype=np.float64)
    parts = max(1, min(parts, len(values)))
    spread = float(np.ptp(values))
    scaled = (values - values.min()) / spread if spread > 0 else np.zeros(len(values))
    total = np.concatenate([[0.0], np.cumsum(scaled)]).tolist()
    cuts = [len(values) // parts * i for i in range(parts)] + [len(values)]
    sizes = [total[b] - total[a] for a, b in pairwise(cuts)]
    while True:
        largest = max(range(parts), key=lambda block: sizes[block])
        while True:
            least = min(sizes)
            smallest = min((b for b in range(parts) if sizes[b] == least), key=lambda b: abs(b - largest))
            # Rounding must not keep two blocks handing one layer to and fro.
            if sizes[largest] <= least + 1.0 + 1e-9:
                return cuts
            if largest < smallest:
                giver, cut = smallest - 1, smallest
                cuts[cut] -= 1
            else:
                giver, cut = smallest + 1, smallest + 1
                cuts[cut] += 1
            for block in (giver, smallest):
                sizes[block] = total[cuts[block + 1]] - total[cuts[block]]
            if giver == largest:
                break
