"""Bi-partition of a chain: the exact dynamic programme.

Problem: cut the forward pass of L layers and, elsewhere, the backward pass into one run of layers for each of W workers, so
that the most loaded worker is as little loaded as possible.

``T[i][p][q] = min over p' <= p, q' <= q of max(T[i-1][p'][q'], cost(p'..p; q'..q))`` takes O(W L^4), or O(W L^2 g^2) where
forward and backward cuts may be at most g layers apart. g = 0 is the layer-wise partition.

Among cuts with the smallest bottleneck the ones with the least traffic are returned, and of those the ones that displace the
fewest layers. PipeDream's layer-wise plan is the special case of equal cuts, so that the optimum is never worse than that.

Axes: L layers, W workers in pipeline order.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry, inner
from rlplace.errors import InputError, whole_number


class PassCosts(NamedTuple):
    """A chain on workers, as the kernels read it; prefix sums and cuts have L + 1 entries."""

    ahead: Any  # float64 [W, L + 1], prefix seconds of the forward pass
    back: Any  # float64 [W, L + 1], prefix seconds of the backward pass
    cut_a: Any  # float64 [L + 1], bytes of the forward pass that cross each cut, 0 at both ends
    cut_g: Any  # float64 [L + 1], bytes of the backward pass
    stash: Any  # float64 [L + 1], prefix bytes
    weight: Any  # float64 [L + 1], prefix bytes
    resident: Any  # float64 [L + 1], prefix bytes
    inverse: Any  # float64 [W] seconds per byte
    limit: Any  # float64 [W] bytes


@inner
def _worker(i, p0, p, q0, q, c):
    """Returns the cost of worker i with forward layers p0..p and backward layers q0..q, and its traffic in seconds.

    What it sends and what it receives run at the same time, so that the larger of the two counts. Infinite when the memory
    limit does not hold.
    """
    low, high = max(p0, q0), min(p, q)
    stash_f, stash_b = c.stash[p] - c.stash[p0], c.stash[q] - c.stash[q0]
    weight_f, weight_b = c.weight[p] - c.weight[p0], c.weight[q] - c.weight[q0]
    if low < high:  # only the parts of displaced layers stay
        stash_f -= c.stash[high] - c.stash[low]
        stash_b -= c.stash[high] - c.stash[low]
        weight_f -= c.weight[high] - c.weight[low]
        weight_b -= c.weight[high] - c.weight[low]
    if c.limit[i] < np.inf:
        held = c.resident[q] - c.resident[q0] + weight_f
        if held + (c.stash[p] - c.stash[p0] + stash_b) > c.limit[i]:
            return np.inf, 0.0
    sent, received = stash_f + weight_b, stash_b + weight_f
    if p > p0:
        sent += c.cut_a[p]
        received += c.cut_a[p0]
    if q > q0:
        sent += c.cut_g[q0]
        received += c.cut_g[q]
    load = c.ahead[i, p] - c.ahead[i, p0] + (c.back[i, q] - c.back[i, q0])
    traffic = max(sent, received) * c.inverse[i]
    return max(load, traffic), traffic


@entry
def worker_costs(forward, backward, c):
    """Returns float64 [W], the cost of each worker for given cuts."""
    cost = np.empty(len(forward) - 1)
    for i in range(len(cost)):
        cost[i] = _worker(i, forward[i], forward[i + 1], backward[i], backward[i + 1], c)[0]
    return cost


@entry
def best_cuts(gap, bound, objective, left, c):
    """Returns the best values and their origins [W + 1, L + 1, 2 gap + 1] for pairs of cuts (p, q) with |p - q| <= gap, at
    [i, p, q - p + gap].

    ``best[i, p, q]``: the first p forward and q backward layers on the first i workers. Workers may stay empty. No worker may
    cost more than `bound`. Objective 0 is the largest cost, 1 the sum of transfer seconds and a little for every displaced
    layer, 2 the sum of squared costs. `origin` is the pair before, as p * (L + 1) + q. `left` float64 [2, L + 1] are seconds of
    the layers from each on in either pass, on their quickest workers: pairs that leave more than the rest can take are dropped.
    """
    workers, layers = len(c.inverse), c.ahead.shape[1] - 1
    width = 2 * gap + 1
    little = 1e-9 * (c.ahead[0, layers] + c.back[0, layers]) / layers
    best = np.full((workers + 1, layers + 1, width), np.inf)
    origin = np.zeros(best.shape, dtype=np.int64)
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
                    seconds = c.ahead[i, p] - c.ahead[i, p0]
                    if seconds > bound:
                        break
                    top = min(layers, p + gap)
                    for q in range(top if last else max(q0, p - gap), top + 1):
                        if q < q0 or (last and q < layers) or left[0, p] + left[1, q] > rest:
                            continue
                        if seconds + (c.back[i, q] - c.back[i, q0]) > bound:
                            break
                        cost, traffic = _worker(i, p0, p, q0, q, c)
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
    return best, origin


@dataclass(frozen=True, eq=False)
class Chain:
    """Layers in the order in which the forward pass runs them; costs of one pass of the batch.

    Attributes:
        names: L names.
        forward_s, backward_s: float64 [L], or [L, W] where workers differ; finite.
        activation_bytes: float64 [L], bytes that the forward pass sends across the cut behind each layer.
        gradient_bytes: float64 [L], bytes that the backward pass sends back across the same cut.
        stash_bytes: float64 [L], bytes of the forward pass that the layer's backward reads: kept in between, and
            shipped where they run on different workers.
        weight_bytes: float64 [L], parameters: returned to the worker of the forward pass where the two differ.
        resident_bytes: float64 [L], pinned by the worker that runs the backward pass (weights, gradients, optimizer state).
    """

    names: tuple[str, ...]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    activation_bytes: NDArray[np.float64]
    gradient_bytes: NDArray[np.float64]
    stash_bytes: NDArray[np.float64]
    weight_bytes: NDArray[np.float64]
    resident_bytes: NDArray[np.float64]

    @property
    def num_layers(self) -> int:
        return len(self.names)


@dataclass(frozen=True, eq=False)
class Workers:
    """The workers of a pipeline; a worker computes while it transfers and takes the longer of the two.

    Attributes:
        seconds_per_byte: float64 [W], inverse bandwidth of each worker's link; 0: communication costs nothing.
        memory_bytes: float64 [W], inf where there is no limit.
    """

    seconds_per_byte: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]

    @property
    def count(self) -> int:
        return len(self.memory_bytes)


def free_workers(count: int) -> Workers:
    """Returns a number of workers without communication costs and memory limits.

    Raises:
        InputError: The number is below 1.
    """
    whole_number(count, "workers: count", 1)
    return Workers(np.zeros(count), np.full(count, np.inf))


@dataclass(frozen=True)
class PassCuts:
    """Layers by worker: worker i has the forward pass of layers ``forward[i]`` up to ``forward[i + 1]``, and so on.

    Attributes:
        forward, backward: W + 1 offsets into the layers, from 0 to L.
        bottleneck_s: The largest cost of a worker: the inverse of the throughput in steady state.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    bottleneck_s: float

    @property
    def gap(self) -> int:
        """The largest distance between a forward cut and its backward cut, in layers."""
        return max(abs(p - q) for p, q in zip(self.forward, self.backward, strict=True))

    @property
    def displaced(self) -> tuple[int, ...]:
        """Layers whose forward and backward pass run on different workers."""
        forward, backward = (np.repeat(np.arange(len(c) - 1), np.diff(c)) for c in (self.forward, self.backward))
        return tuple(np.flatnonzero(forward != backward).tolist())


_BOTTLENECK, _TRAFFIC, _EVEN = 0, 1, 2


def bi_partition(chain: Chain, workers: Workers | int, gap: int | None = None) -> PassCuts | None:
    """Returns the exact optimum with separate forward and backward cuts.

    Args:
        chain: The layers.
        workers: The pipeline, or a number of workers without communication costs and memory limits.
        gap: Layers that a forward cut and its backward cut may be apart; None: any number.

    Returns:
        The cuts, or None when none respect the memory limits.

    Raises:
        InputError: A negative gap, or times for a different number of workers.
    """
    if gap is not None:
        whole_number(gap, "bi_partition: gap")
    bound = bottleneck_s(chain, workers, gap)
    return None if bound == np.inf else least_traffic(chain, workers, bound, gap)


def bottleneck_s(chain: Chain, workers: Workers | int, gap: int | None = None, *, known_s: float = np.inf) -> float:
    """Returns the smallest largest cost of a worker; inf where memory limits leave no cuts.

    Args:
        chain: The layers.
        workers: The pipeline, or a number of workers without communication costs and memory limits.
        gap: Layers that a forward cut and its backward cut may be apart; None: any number.
        known_s: The result for a smaller gap, if known, as an upper bound.
    """
    pipeline = workers if isinstance(workers, Workers) else free_workers(workers)
    costs = pass_costs(chain, pipeline)
    bound = known_s
    if bound == np.inf:
        # Any cuts bound the layer-wise optimum, and that bounds everything else, which prunes most pairs of cuts.
        bound = min(price_cuts(cuts, cuts, costs).bottleneck_s for cuts in _quick_cuts(costs.ahead + costs.back))
        bound, _ = _fill(costs, 0, bound, _BOTTLENECK)
    reach = chain.num_layers if gap is None else min(int(gap), chain.num_layers)
    return _fill(costs, reach, bound, _BOTTLENECK)[0] if reach else bound


def least_traffic(
    chain: Chain, workers: Workers | int, bound_s: float, gap: int | None = None, *, even: bool = False
) -> PassCuts | None:
    """Returns the cuts with the least traffic among those where no worker costs more than `bound_s`; None when there are none.

    Args:
        chain: The layers.
        workers: The pipeline, or a number of workers without communication costs and memory limits.
        bound_s: Largest cost of a worker that is allowed, at least the smallest bottleneck.
        gap: Layers that a forward cut and its backward cut may be apart; None: any number.
        even: Whether to minimise the sum of squared costs in place of the traffic.
    """
    pipeline = workers if isinstance(workers, Workers) else free_workers(workers)
    costs = pass_costs(chain, pipeline)
    reach = chain.num_layers if gap is None else min(int(gap), chain.num_layers)
    value, origin = _fill(costs, reach, bound_s, _EVEN if even else _TRAFFIC)
    if value == np.inf:
        return None
    forward, backward = [chain.num_layers], [chain.num_layers]
    for row in origin[:0:-1]:
        p, q = divmod(int(row[forward[-1], backward[-1] - forward[-1] + reach]), chain.num_layers + 1)
        forward.append(p)
        backward.append(q)
    return price_cuts(forward[::-1], backward[::-1], costs)


def layer_wise(chain: Chain, workers: Workers | int) -> PassCuts | None:
    """Returns the exact optimum with equal cuts, as PipeDream without replication; None when memory limits leave none."""
    return bi_partition(chain, workers, 0)


def _quick_cuts(prefix: NDArray[np.float64]) -> list[list[int]]:
    """Returns layer-wise cuts: everything on the quickest worker, and equal loads without communication.

    Args:
        prefix: float64 [W, L + 1], prefix seconds of both passes.
    """
    workers, layers = len(prefix), prefix.shape[1] - 1
    quickest = int(prefix[:, -1].argmin())
    candidates = [[0] * (quickest + 1) + [layers] * (workers - quickest)]
    low, high = 0.0, float(prefix[quickest, -1])
    for _ in range(30):
        middle = 0.5 * (low + high)
        cuts = [0]
        for row in prefix:
            cuts.append(int(np.searchsorted(row, row[cuts[-1]] + middle, side="right")) - 1)
        low, high = (low, middle) if cuts[-1] == layers else (middle, high)
        if cuts[-1] == layers:
            candidates[1:] = [cuts]
    return candidates


def _fill(costs: PassCosts, gap: int, bound: float, objective: int) -> tuple[float, NDArray[np.int64]]:
    """Returns the value of the whole chain, inf when the bound leaves no cuts, and the table to trace."""
    left = np.zeros((2, costs.ahead.shape[1]))
    for row, prefix in zip(left, (costs.ahead, costs.back), strict=True):
        row[:-1] = np.cumsum(np.diff(prefix, axis=1).min(axis=0)[::-1])[::-1]
    best, origin = best_cuts(gap, bound, objective, left, costs)
    return float(best[-1, -1, gap]), origin


def price_cuts(forward: Sequence[int], backward: Sequence[int], costs: PassCosts) -> PassCuts:
    """Returns cuts with the largest cost of a worker under them, inf where its memory does not suffice."""
    cost = worker_costs(np.array(forward), np.array(backward), costs)
    return PassCuts(tuple(forward), tuple(backward), float(cost.max()))


def pass_costs(chain: Chain, workers: Workers) -> PassCosts:
    """Returns a chain on workers as the kernels read it.

    Raises:
        InputError: The times are for a different number of workers.
    """

    def prefix(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([[0.0], np.cumsum(values)])

    def crossing(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([[0.0], values[:-1], [0.0]])

    def by_worker(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        rows = np.broadcast_to(seconds, (workers.count, len(seconds))) if seconds.ndim == 1 else seconds.T
        if len(rows) != workers.count:
            raise InputError(f"chain: times are for {len(rows)} workers, the pipeline has {workers.count}")
        sums = np.zeros((workers.count, rows.shape[1] + 1))  # in C order whatever that of the times: kernels compile once
        np.cumsum(rows, axis=1, out=sums[:, 1:])
        return sums

    return PassCosts(
        ahead=by_worker(chain.forward_s),
        back=by_worker(chain.backward_s),
        cut_a=crossing(chain.activation_bytes),
        cut_g=crossing(chain.gradient_bytes),
        stash=prefix(chain.stash_bytes),
        weight=prefix(chain.weight_bytes),
        resident=prefix(chain.resident_bytes),
        inverse=workers.seconds_per_byte.astype(np.float64),
        limit=workers.memory_bytes.astype(np.float64),
    )
