"""States of a pipeline: the sets of layers that a first few stages can have, for the PipeDream planner.

A state is a set of layers with everything that feeds them (PipeDream names it by its antichain of last layers). On a chain the
states are the prefixes. A stage is what lies between a state and a larger one.

Axes: S states, L layers, W workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.bipartition.layers import Layers
from rlplace.problem import FORWARD, Problem

MAX_STATES = 300
"""With more states than this, only those of the chain are looked at."""


@dataclass(frozen=True, eq=False)
class States:
    """Sets of layers, the empty one first and the full one last, every set behind its subsets.

    Attributes:
        member: bool [S, L].
        inside: bool [S, S], whether the first is a subset of the second, or equal.
        time_s: float64 [W, S], seconds of a micro-batch, forward and backward, on each worker.
        crossing_bytes: float64 [S], activations and gradients that cross the border of a state.
        resident_bytes, stash_bytes: float64 [S].
    """

    member: NDArray[np.bool_]
    inside: NDArray[np.bool_]
    time_s: NDArray[np.float64]
    crossing_bytes: NDArray[np.float64]
    resident_bytes: NDArray[np.float64]
    stash_bytes: NDArray[np.float64]

    @property
    def count(self) -> int:
        return len(self.member)


def chain_states(layers: Layers) -> States:
    """The prefixes of the chain."""
    chain = layers.chain
    member = np.tri(chain.num_layers + 1, chain.num_layers, -1, dtype=bool)
    crossing = np.concatenate([[0.0], (chain.activation_bytes + chain.gradient_bytes)[:-1], [0.0]])
    return _states(layers, member, crossing)


def branch_states(problem: Problem, layers: Layers) -> States | None:
    """All sets of layers that are closed under what feeds them; None when there are more than `MAX_STATES`."""
    sets = _closed_sets(problem, layers)
    if sets is None:
        return None
    count = layers.chain.num_layers
    member = np.array([[bool(found >> layer & 1) for layer in range(count)] for found in sets], dtype=bool)
    return _states(layers, member, _crossing(problem, layers, member))


def _layer_edges(problem: Problem, layers: Layers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Layers between which forward tensors go, each pair once; what runs against the chain's order is left out."""
    of_op = layers.layer_of_group[problem.op_group]
    (maker, reader), forward = problem.op_edges, problem.op_phase == FORWARD
    kept = forward[maker] & forward[reader]
    source, target = of_op[maker[kept]], of_op[reader[kept]]
    pairs = np.unique(np.stack([source, target])[:, source < target], axis=1)
    return pairs[0], pairs[1]


def _closed_sets(problem: Problem, layers: Layers) -> list[int] | None:
    """The sets as bit masks, small ones first."""
    count = layers.chain.num_layers
    needs = [0] * count
    for source, target in zip(*(side.tolist() for side in _layer_edges(problem, layers)), strict=True):
        needs[target] |= 1 << source
    found, wave = {0}, {0}
    while wave:
        wave = {
            state | 1 << layer
            for state in wave
            for layer in range(count)
            if not state >> layer & 1 and needs[layer] & ~state == 0
        }
        found |= wave
        if len(found) > MAX_STATES:
            return None
    return sorted(found, key=lambda state: (state.bit_count(), state))


def _crossing(problem: Problem, layers: Layers, member: NDArray[np.bool_]) -> NDArray[np.float64]:
    """float64 [S], bytes of tensors with some of their ops in a state and some outside."""
    of_op = layers.layer_of_group[problem.op_group]
    tensor, reader = problem.edge_tensor, problem.consumers
    made = problem.tensor_producer[tensor]
    forward = problem.op_phase == FORWARD
    kept = (made >= 0) & (forward[reader] == forward[np.maximum(made, 0)])
    pairs = np.unique(np.stack([tensor[kept], of_op[made[kept]], of_op[reader[kept]]]), axis=1)
    apart = member[:, pairs[1]] != member[:, pairs[2]]
    result = np.zeros(len(member))
    for state, row in enumerate(apart):
        result[state] = problem.tensor_bytes[np.unique(pairs[0][row])].sum()
    return result


def _states(layers: Layers, member: NDArray[np.bool_], crossing: NDArray[np.float64]) -> States:
    chain, counts = layers.chain, member.astype(np.float64)
    seconds = chain.forward_s + chain.backward_s
    shared = counts @ counts.T
    return States(
        member=member,
        inside=shared >= counts.sum(axis=1)[:, None],
        time_s=np.ascontiguousarray((counts @ seconds).T),
        crossing_bytes=crossing,
        resident_bytes=counts @ chain.resident_bytes,
        stash_bytes=counts @ chain.stash_bytes,
    )
