"""Layer-wise pipelines of a chain of layers, for 1 to D devices.

The exact cut with the smallest largest stage, with and without what is sent over cuts (Narayanan et al., "PipeDream", SOSP
2019), and torchgpipe's partition (Kim et al., 2020), which may miss that optimum: from equal numbers of layers, and costs
scaled to 0..1, a largest block p is fixed; while it exceeds the smallest block q by more than 1, the block beside q on p's
side hands its nearest layer to q; when p itself gave a layer, another largest block is fixed (Bárány, Grinberg, "Block
partitions of sequences", 2013). Of the smallest blocks the one nearest to p takes the layer. Layers hold what belongs
together, a forward group and its backward among it, where `rlplace.placement.balanced` cuts plain orders of groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.subsets import device_subsets
from rlplace.placement.published.bipartition.layers import layer_orders, make_layers, make_pipeline
from rlplace.placement.published.bipartition.solve import Cuts, layer_wise
from rlplace.problem import Problem

MAX_LAYERS = 512
"""Most layers of a chain; neighbours are merged beyond."""


def straight_pipelines(problem: Problem) -> Iterator[Assignment]:
    """Both partitions for every number of devices and order; without memory limits where those leave none, for the repair."""
    for subset in reversed(device_subsets(problem)):
        for order in layer_orders(problem):
            layers = make_layers(problem, order, subset, max_layers=MAX_LAYERS)
            for sends in (True, False):
                for limited in (True, False):
                    workers = make_pipeline(problem, subset, limited=limited)
                    inverse = workers.seconds_per_byte if sends else np.zeros(workers.count)
                    cuts = layer_wise(layers.chain, replace(workers, seconds_per_byte=inverse))
                    if cuts is not None:
                        yield layers.assign(problem, cuts)
                        break
            blocks = block_partition(layers.chain.mean_s, len(subset))
            offsets = tuple(blocks) + (layers.chain.num_layers,) * (len(subset) + 1 - len(blocks))
            yield layers.assign(problem, Cuts(offsets, offsets, float("nan")))


def block_partition(costs: Sequence[float] | NDArray[np.float64], parts: int) -> list[int]:
    """The balanced partition of a sequence that torchgpipe makes.

    Args:
        costs: Cost of each layer.
        parts: Number of blocks, at most the number of layers.

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
