"""Compiled parts of bi-partition: the cost of a worker, and the dynamic programmes over pairs of cuts.

Every array that goes by worker is [W, ...] in pipeline order; prefix arrays have L + 1 entries. `ahead` and `back` [W, L + 1]
are prefix seconds of the two passes; `cut_a` and `cut_g` [L + 1] the bytes that cross each cut, 0 at both ends; `stash`,
`weight` and `resident` [L + 1] prefix bytes.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, inner


@inner
def _worker(
    i, p0, p, q0, q, ahead, back, cut_a, cut_g, stash, weight, resident, inverse, limit,
):  # fmt: skip
    """Cost of worker i with forward layers p0..p and backward layers q0..q, and its traffic in seconds.

    What it sends and what it receives run at the same time, so that the larger of the two counts. Infinite when the memory
    limit does not hold.
    """
    low, high = max(p0, q0), min(p, q)
    both = low < high
    stash_f, stash_b = stash[p] - stash[p0], stash[q] - stash[q0]
    weight_f, weight_b = weight[p] - weight[p0], weight[q] - weight[q0]
    if both:  # only the parts of displaced layers stay
        stash_f -= stash[high] - stash[low]
        stash_b -= stash[high] - stash[low]
        weight_f -= weight[high] - weight[low]
        weight_b -= weight[high] - weight[low]
    if limit[i] < np.inf:
        held = resident[q] - resident[q0] + weight_f
        if held + (stash[p] - stash[p0] + stash_b) > limit[i]:
            return np.inf, 0.0
    sent, received = stash_f + weight_b, stash_b + weight_f
    if p > p0:
        sent += cut_a[p]
        received += cut_a[p0]
    if q > q0:
        sent += cut_g[q0]
        received += cut_g[q]
    load = ahead[i, p] - ahead[i, p0] + (back[i, q] - back[i, q0])
    traffic = max(sent, received) * inverse[i]
    return max(load, traffic), traffic


@entry
def worker_costs(
    forward, backward, ahead, back, cut_a, cut_g, stash, weight, resident, inverse, limit,
    cost,
):  # fmt: skip
    """Fills `cost` [W] for given cuts."""
    for i in range(len(cost)):
        cost[i] = _worker(
            i, forward[i], forward[i + 1], backward[i], backward[i + 1], ahead, back, cut_a, cut_g, stash, weight, resident,
            inverse, limit,
        )[0]  # fmt: skip


@entry
def best_cuts(
    gap, bound, objective, ahead, back, cut_a, cut_g, stash, weight, resident, inverse, limit, left_ahead,
    left_back, best, origin,
):  # fmt: skip
    """Fills `best` and `origin` [W + 1, L + 1, 2 gap + 1] for pairs of cuts (p, q) with |p - q| <= gap, at [i, p, q - p + gap].

    ``best[i, p, q]``: the first p forward and q backward layers on the first i workers. Workers may stay empty. No worker may
    cost more than `bound`. Objective 0 is the largest cost, 1 the sum of transfer seconds and a little for every displaced
    layer, 2 the sum of squared costs. `origin` is the pair before, as p * (L + 1) + q. `left_ahead` and `left_back` [L + 1] are
    seconds of the layers from each on, on their quickest workers: pairs that leave more than the rest can take are dropped.
    """
    workers, layers = len(inverse), ahead.shape[1] - 1
    width = 2 * gap + 1
    little = 1e-9 * (ahead[0, layers] + back[0, layers]) / layers
    best[:] = np.inf
    best[0, 0, gap] = 0.0
    for i in range(workers):
        last = i == workers - 1
        rest = bound * (workers - 1 - i) * (1.0 + 1e-9)
        for p0 in range(layers + 1):
            for d0 in range(width):
                q0 = p0 + d0 - gap
                before = best[i, p0, d0] if 0 <= q0 <= layers else np.inf
                if before == np.inf:
                    continue
                for p in range(layers if last else p0, layers + 1):
                    seconds = ahead[i, p] - ahead[i, p0]
                    if seconds > bound:
                        break
                    top = min(layers, p + gap)
                    for q in range(top if last else max(q0, p - gap), top + 1):
                        if q < q0 or (last and q < layers) or left_ahead[p] + left_back[q] > rest:
                            continue
                        if seconds + (back[i, q] - back[i, q0]) > bound:
                            break
                        cost, traffic = _worker(
                            i, p0, p, q0, q, ahead, back, cut_a, cut_g, stash, weight, resident, inverse, limit,
                        )  # fmt: skip
                        if cost > bound:
                            continue
                        if objective == 0:
                            value = max(before, cost)
                        elif objective == 1:
                            common = min(p, q) - max(p0, q0)
                            value = before + traffic + little * (p - p0 - max(common, 0))
                        else:
                            value = before + cost * cost
                        d = q - p + gap
                        if value < best[i + 1, p, d]:
                            best[i + 1, p, d] = value
                            origin[i + 1, p, d] = p0 * (layers + 1) + q0
