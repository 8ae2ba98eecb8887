"""Large-neighbourhood search from the floor.

Problem: step time of the executor itself, as in `annealing`. A connected cluster of groups is taken off its devices and put
back group by group, in the depth-first order, each where load and transfers together are least up to noise. The plan is kept
when it is better, or worse by no more than a threshold that falls with the spent budget.

Paper: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", 1998; the acceptance is
record-to-record travel (Dueck, "New optimization heuristics", 1993).

Departures: the insertion is a greedy list scheduler instead of constraint programming.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlplace.compiled import entry, stamp_of
from rlplace.errors import InputError, show
from rlplace.placement.common import movekernels
from rlplace.placement.common.groupgraph import group_graph, traffic
from rlplace.placement.common.movekernels import draw_uniform
from rlplace.placement.search import PlacementSearch, search_planner


@dataclass(frozen=True)
class LnsSettings:
    """Parameters of the search.

    Attributes:
        largest: Largest cluster, as a share of all groups; sizes are log-uniform from 2 groups on.
        noise: Largest factor, less one, by which the cost of a device is overrated at random.
        balance: Weight of a device's load beside the group's own time and transfers.
        worse: Largest increase of the step time over the best one at which a plan is kept, at the beginning; it falls to 0.
    """

    largest: float = 0.1
    noise: float = 1.0
    balance: float = 0.02
    worse: float = 0.001

    def __post_init__(self) -> None:
        for name, most in (("largest", 1.0), ("noise", math.inf), ("balance", math.inf), ("worse", math.inf)):
            value = getattr(self, name)
            if not 0.0 <= value <= most or value == math.inf:
                raise InputError(f"lns: {name} must be a number from 0 up to {most:g}, found {show(value)}")


@search_planner(LnsSettings, doc=__doc__)
def lns(search: PlacementSearch, seed: int, settings: LnsSettings) -> None:
    """Spends the search's budget; `seed` is the seed of clusters and noise."""
    problem = search.evaluator.problem
    graph, groups = group_graph(problem), problem.num_groups
    if problem.num_devices < 2 or not (problem.group_allowed.sum(axis=1) > 1).any():
        return
    state = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    position, links = np.argsort(graph.depth_first_order, kind="stable"), traffic(problem)
    chosen, after = np.zeros(groups, dtype=np.int32), np.zeros(groups, dtype=np.int32)
    largest, idle = max(2.0, settings.largest * groups), 0
    while search.budget.share() < 1.0 and idle < 1000:
        after[:] = search.assignment
        size = rebuild(state, largest, settings.noise, settings.balance, position, graph.time_s, chosen, after, links)
        moved = [(int(g), int(after[g])) for g in chosen[:size] if after[g] != search.assignment[g]]
        idle = 0 if moved else idle + 1
        if moved:
            score = search.evaluate(moved)
            limit = 1.0 + settings.worse * (1.0 - search.budget.share())
            if score.descent_s < search.score.descent_s or score.descent_s <= limit * search.best_score.descent_s:
                search.accept(moved, score)


def _compile(stamp):
    @entry
    def rebuild(state, largest, noise, balance, position, time_s, chosen, devices, links):
        """Places a connected cluster of groups anew; returns its size.

        Args:
            state: uint64 [1], state of the random numbers.
            largest: Most groups of the cluster.
            noise: See `LnsSettings`.
            balance: Likewise.
            position: int64 [G], of a group in the depth-first order.
            time_s: float64 [G, D]; inf where a group may not sit.
            chosen: int32 [G], filled: the groups of the cluster.
            devices: int32 [G], changed.
            links: What prices transfers, see `rlplace.placement.common.groupgraph.Traffic`.
        """
        _ = stamp
        neighbor_ptr, neighbor, neighbor_edge, neighbor_out, edge_bytes, edge_count, edge_fixed_s, latency, inverse = links
        groups, count = time_s.shape
        size = np.int64(2.0 * (largest / 2.0) ** draw_uniform(state))
        chosen[0] = np.int64(draw_uniform(state) * groups)
        free = np.zeros(groups, dtype=np.bool_)
        free[chosen[0]] = True
        found, at = 1, 0
        while at < found and found < size:
            member = chosen[at]
            at += 1
            for i in range(neighbor_ptr[member], neighbor_ptr[member + 1]):
                other = neighbor[i]
                if found < size and not free[other] and draw_uniform(state) < 0.7:
                    free[other] = True
                    chosen[found] = other
                    found += 1
        load = np.zeros(count)
        for g in range(groups):
            if not free[g]:
                load[devices[g]] += time_s[g, devices[g]]
        order = np.argsort(position[chosen[:found]])
        for k in range(found):
            g = chosen[order[k]]
            best, least = devices[g], np.inf
            for d in range(count):
                if time_s[g, d] == np.inf:
                    continue
                sent = 0.0
                for i in range(neighbor_ptr[g], neighbor_ptr[g + 1]):
                    other, e = neighbor[i], neighbor_edge[i]
                    if not free[other] and devices[other] != d:
                        a, b = (d, devices[other]) if neighbor_out[i] else (devices[other], d)
                        sent += edge_count[e] * latency[a, b] + edge_bytes[e] * inverse[a, b] + edge_fixed_s[e]
                cost = (load[d] * balance + time_s[g, d] + sent) * (1.0 + noise * draw_uniform(state))
                if cost < least:
                    best, least = d, cost
            devices[g] = best
            load[best] += time_s[g, best]
            free[g] = False
        return found

    return rebuild


rebuild = _compile(stamp_of(movekernels))
