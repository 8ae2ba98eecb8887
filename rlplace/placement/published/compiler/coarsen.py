"""Fusing vertices with heavy traffic between them, so that refinement can move them together.

Vertices of one device and band are matched in pairs by heaviest traffic; chains of single consumers, whose traffic has nowhere
else to go, come out first.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry
from rlplace.placement.published.compiler.nets import Level

WIDE = 32
"""Nets with more readers than this are ignored when vertices are matched."""


def match(
    level: Level, part: NDArray[np.int32], order: NDArray[np.int64], link: tuple[float, float], most_s: float
) -> NDArray[np.int32]:
    """Cluster of every vertex, numbered from 0 by first member.

    Args:
        level: The graph.
        part: int32 [G]; only vertices of one part are matched.
        order: int64 [G], order in which vertices choose their partner.
        link: Latency in seconds and seconds per byte, by which traffic is weighed.
        most_s: Largest time of a cluster on the fastest device.
    """
    nets = level.nets
    seconds = nets.tensors * link[0] + nets.size_bytes * link[1] + nets.fixed_s
    partner = np.full(len(part), -1, dtype=np.int64)
    here_s = level.time_s.min(axis=1)
    allowed = np.isfinite(level.time_s)
    _match(
        order, part, level.band, here_s, allowed, most_s, seconds, nets.source, nets.pin_ptr, nets.pins, level.source_ptr,
        level.source_nets, level.reader_ptr, level.reader_nets, partner, np.zeros(len(part)),
    )  # fmt: skip
    leader = np.where(partner >= 0, np.minimum(partner, np.arange(len(part))), np.arange(len(part)))
    return np.unique(leader, return_inverse=True)[1].astype(np.int32)


@entry
def _match(
    order, part, band, here_s, allowed, most_s, seconds, source, pin_ptr, pins, s_ptr, s_nets, r_ptr, r_nets, partner, weight
):  # fmt: skip
    """Fills `partner`; `weight` float64 [G] are zeros before and after."""
    near = np.empty(len(part), dtype=np.int64)
    for v in order:
        if partner[v] >= 0:
            continue
        count = 0
        for i in range(s_ptr[v], s_ptr[v + 1]):
            net = s_nets[i]
            readers = pin_ptr[net + 1] - pin_ptr[net]
            if readers > WIDE:
                continue
            for j in range(pin_ptr[net], pin_ptr[net + 1]):
                if weight[pins[j]] == 0.0:
                    near[count] = pins[j]
                    count += 1
                weight[pins[j]] += (seconds[net] + 1e-30) / readers
        for i in range(r_ptr[v], r_ptr[v + 1]):
            net = r_nets[i]
            readers = pin_ptr[net + 1] - pin_ptr[net]
            if readers > WIDE:
                continue
            if weight[source[net]] == 0.0:
                near[count] = source[net]
                count += 1
            weight[source[net]] += (seconds[net] + 1e-30) / readers
        best, heaviest = -1, 0.0
        for i in range(count):
            u = near[i]
            if partner[u] < 0 and u != v and part[u] == part[v] and band[u] == band[v] and weight[u] > heaviest:
                same = True  # a pair may sit wherever its members may
                for d in range(allowed.shape[1]):
                    same &= allowed[u, d] == allowed[v, d]
                if same and here_s[u] + here_s[v] <= most_s:
                    best, heaviest = u, weight[u]
            weight[u] = 0.0
        if best >= 0:
            partner[v], partner[best] = best, v
