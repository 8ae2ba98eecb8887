"""The compiled loop of the Markov chain."""

from __future__ import annotations

import numpy as np

from rlplace.compiled import entry


@entry
def walk(
    current, layer_cost, offsets, pointers, near, edge_cost, layers, picks, accepts, beta, restart, patience
):  # fmt: skip
    """A Markov chain over strategies.

    Args:
        current: Configuration of each layer, by index; changed in place.
        layer_cost: Costs of all layers one after the other, starting at `offsets`.
        offsets: Where each layer's costs start, with the end.
        pointers: Where each layer's edges start in `near`, with the end.
        near: For each end of an edge: the other layer, where the edge's table starts in `edge_cost`, stride of this layer's
            configuration and of the other's.
        edge_cost: Tables of all edges.
        layers: Layer of each proposal.
        picks: Its configuration, as a fraction.
        accepts: The random number that decides.
        beta: Reluctance per unit of cost.
        restart: Proposals between returns to the best.
        patience: Proposals without a new best after which the chain stops.

    Returns:
        The best strategy met.
    """
    best = current.copy()
    gap = 0.0  # current cost less the best
    last = 0
    for step in range(layers.size):
        if step - last > patience:
            break
        if step % restart == 0:
            current[:] = best
            gap = 0.0
        layer = layers[step]
        old = current[layer]
        new = int(picks[step] * (offsets[layer + 1] - offsets[layer]))
        if new == old:
            continue
        change = layer_cost[offsets[layer] + new] - layer_cost[offsets[layer] + old]
        for k in range(pointers[layer], pointers[layer + 1]):
            base = near[k, 1] + near[k, 3] * current[near[k, 0]]
            change += edge_cost[base + near[k, 2] * new] - edge_cost[base + near[k, 2] * old]
        if change <= 0.0 or accepts[step] < np.exp(-beta * change):
            current[layer] = new
            gap += change
            if gap < 0.0:
                best[:] = current
                gap = 0.0
                last = step
    return best
