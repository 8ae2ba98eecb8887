"""The compiled loop of the search."""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry


@entry
def min_plus(left, right, left_row, right_row):
    """Minimum over v of ``left[left_row[o], v] + right[right_row[o], v, w]`` for all o and w.

    Args:
        left: Array (rows, V).
        right: Array (rows, V, W).
        left_row: Row of `left` for each o.
        right_row: Row of `right` for each o.

    Returns:
        Minima and the first v that attains each, arrays (o, W).
    """
    outer, width, columns = left_row.size, left.shape[1], right.shape[2]
    values = np.empty((outer, columns))
    arg_min = np.empty((outer, columns), np.uint16)
    best = np.empty(columns)
    first = np.empty(columns, np.int64)  # as wide as a cost, so that both are compared and moved together
    for o in range(outer):
        p, q = left[left_row[o]], right[right_row[o]]
        for w in range(columns):
            best[w] = p[0] + q[0, w]
            first[w] = 0
        for v in range(1, width):
            base = p[v]
            for w in range(columns):
                cost = base + q[v, w]
                better = cost < best[w]
                best[w] = cost if better else best[w]
                first[w] = v if better else first[w]
        for w in range(columns):
            values[o, w] = best[w]
            arg_min[o, w] = first[w]
    return values, arg_min


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
