"""Chains and workers written by hand, as profiles and examples give them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.placement.published.bipartition.solve import Chain, Workers


def make_chain(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    names: Sequence[str] | None = None,
    activation_bytes: ArrayLike = 0.0,
    gradient_bytes: ArrayLike | None = None,
    stash_bytes: ArrayLike | None = None,
    weight_bytes: ArrayLike = 0.0,
    resident_bytes: ArrayLike | None = None,
) -> Chain:
    """A chain of layers.

    Args:
        forward_s: Seconds per layer, [L] or [L, W].
        backward_s: Seconds per layer, likewise.
        names: Default ``layer0``, ``layer1``, ...
        activation_bytes: Per layer, or one number for all; so are the others.
        gradient_bytes: Default `activation_bytes`.
        stash_bytes: Default what the layer before sends: its input.
        weight_bytes: Parameters.
        resident_bytes: Default `weight_bytes`.
    """
    forward, backward = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    layers = len(forward)

    def column(value: ArrayLike) -> NDArray[np.float64]:
        return np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (layers,)))

    activation, weight = column(activation_bytes), column(weight_bytes)
    return Chain(
        names=tuple(f"layer{i}" for i in range(layers)) if names is None else tuple(names),
        forward_s=forward,
        backward_s=backward,
        activation_bytes=activation,
        gradient_bytes=activation.copy() if gradient_bytes is None else column(gradient_bytes),
        stash_bytes=np.concatenate([[0.0], activation[:-1]]) if stash_bytes is None else column(stash_bytes),
        weight_bytes=weight,
        resident_bytes=weight.copy() if resident_bytes is None else column(resident_bytes),
    )


def like_workers(count: int, *, bandwidth_bytes_per_s: float = np.inf, memory_bytes: float = np.inf) -> Workers:
    """Workers that are alike."""
    inverse = np.full(count, 1.0 / bandwidth_bytes_per_s)
    return Workers(inverse, np.full(count, memory_bytes))
