"""How a batch is spread over replicas and micro-batches: equal shares, or shares in proportion to unlike replicas' speed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlplace.strategy.search.space import Space

Shares = tuple[tuple[int, ...], tuple[int, ...]]
"""Samples of a micro-batch, and micro-batches: one entry, or one a replica."""

MOST_MICROBATCHES = 1 << 12

EVERYTHING = Space()


def divisors(number: int) -> list[int]:
    """The divisors of a number, in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@lru_cache(maxsize=4096)
def equal_shares(batch: int, degree: int, space: Space, *, every: bool = False) -> tuple[Shares, ...]:
    """All replicas alike, for micro-batch sizes that divide the share.

    Args:
        batch: Samples a step.
        degree: Replicas.
        space: What may be chosen.
        every: Whether all sizes, not just powers of two, the whole and what the space names.
    """
    if batch % degree:
        return ()
    share = batch // degree
    sizes = space.only("microbatch", divisors(share)) if every else _parts(share, space)
    return tuple(((size,), (share // size,)) for size in sizes if _allows(space, (size,), (share // size,)))


def unlike_shares(batch: int, pace_s: NDArray[np.float64], space: Space, lockstep: bool) -> Iterator[Shares]:
    """Micro-batches of unlike size, or unlike numbers of them; nothing where replicas are alike and the batch divides.

    Args:
        batch: Samples a step.
        pace_s: float64 [D], seconds a sample of every replica.
        space: What may be chosen.
        lockstep: Whether replicas gather for every pass, which needs equal numbers of micro-batches.
    """
    degree = len(pace_s)
    if degree == 1 or (batch % degree == 0 and np.ptp(pace_s) < 1e-9 * pace_s.max()):
        return
    for part in _parts(batch, EVERYTHING):
        parts = proportional(1 / pace_s, batch // part)
        if parts is not None and len(set(parts)) > 1:
            forms = [(parts, (part,))] if lockstep else [(parts, (part,)), ((part,), parts)]
            yield from (form for form in forms if _allows(space, *form))


def _allows(space: Space, sizes: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    some = all(space.allows("microbatch", size) for size in sizes) and all(space.allows("microbatches", n) for n in counts)
    return some and max(counts) <= MOST_MICROBATCHES


def _parts(share: int, space: Space) -> list[int]:
    some = space.only("microbatch", divisors(share))
    return [n for n in some if not n & (n - 1) or n == share or space.microbatch is not None]


def proportional(weights: NDArray[np.float64], total: int) -> tuple[int, ...] | None:
    """Whole numbers from 1 up in proportion to weights, that add up to `total`; None where there are too few."""
    if total < len(weights):
        return None
    exact = weights / weights.sum() * total
    parts = np.maximum(np.floor(exact), 1).astype(np.int64)
    while (rest := total - int(parts.sum())) != 0:
        gain = exact - parts
        at = int(np.argmax(gain)) if rest > 0 else int(np.argmin(np.where(parts > 1, gain, np.inf)))
        parts[at] += 1 if rest > 0 else -1
    return tuple(parts.tolist())
