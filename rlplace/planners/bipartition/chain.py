"""A chain of layers as bi-partition sees it: what each layer costs, sends and keeps, and the workers that share it out.

Axes used below: L layers, W workers in pipeline order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import InputError, show, whole_number


@dataclass(frozen=True, eq=False)
class Chain:
    """Layers in the order in which the forward pass runs them; costs of one micro-batch.

    Attributes:
        names: L names.
        forward_s, backward_s: float64 [L], or [L, W] where workers differ; finite.
        activation_bytes: float64 [L], what the forward pass sends across the cut behind each layer.
        gradient_bytes: float64 [L], what the backward pass sends back across the same cut.
        stash_bytes: float64 [L], what the layer's backward reads of the forward pass: kept from the one to the other, and
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

    @property
    def mean_s(self) -> NDArray[np.float64]:
        """float64 [L], forward plus backward, mean over workers."""
        total = self.forward_s + self.backward_s
        return total if total.ndim == 1 else total.mean(axis=1)


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
    """Builds and checks a chain.

    Args:
        forward_s: Seconds per layer, [L] or [L, W].
        backward_s: Likewise.
        names: Default ``layer0``, ``layer1``, ...
        activation_bytes: Per layer, or one number for all; so are the others.
        gradient_bytes: Default `activation_bytes`.
        stash_bytes: Default what the layer before sends: its input.
        weight_bytes: Parameters.
        resident_bytes: Default `weight_bytes`.

    Raises:
        InputError: Lengths differ, or a number is negative or not finite.
    """
    forward, backward = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    if forward.ndim not in (1, 2) or forward.shape != backward.shape or len(forward) == 0:
        raise InputError(
            f"chain: forward_s and backward_s must be of one shape and not empty: {forward.shape}, {backward.shape}"
        )
    layers = len(forward)

    def column(value: ArrayLike, name: str) -> NDArray[np.float64]:
        try:
            return np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (layers,)))
        except ValueError:
            raise InputError(f"chain: {name} must be one number or {layers}, found {show(value)}") from None

    activation = column(activation_bytes, "activation_bytes")
    gradient = activation.copy() if gradient_bytes is None else column(gradient_bytes, "gradient_bytes")
    stash = np.concatenate([[0.0], activation[:-1]]) if stash_bytes is None else column(stash_bytes, "stash_bytes")
    weight = column(weight_bytes, "weight_bytes")
    resident = weight.copy() if resident_bytes is None else column(resident_bytes, "resident_bytes")
    titles = tuple(f"layer{i}" for i in range(layers)) if names is None else tuple(names)
    if len(titles) != layers:
        raise InputError(f"chain: {len(titles)} names for {layers} layers")
    chain = Chain(titles, forward, backward, activation, gradient, stash, weight, resident)
    for name, value in vars(chain).items():
        if isinstance(value, np.ndarray) and not (np.isfinite(value).all() and (value >= 0).all()):
            raise InputError(f"chain: {name} must hold finite numbers from 0 up")
    return chain


@dataclass(frozen=True, eq=False)
class Workers:
    """The pipeline that the layers are shared out to.

    Attributes:
        seconds_per_byte: float64 [W], of each worker's link; 0: communication costs nothing.
        memory_bytes: float64 [W], inf where there is no limit.
        in_flight: int64 [W], micro-batches whose stash a worker holds at once.
        weight_share: Times that displaced weights travel per micro-batch: 1 where every micro-batch updates them
            (PipeDream), 1 / M where one step has M micro-batches.
        weight_versions: Copies of the weights that a worker keeps.
        overlap: Whether transfers run beside compute, so that a worker takes the longer of the two, or after it.
    """

    seconds_per_byte: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    in_flight: NDArray[np.int64]
    weight_share: float = 1.0
    weight_versions: int = 1
    overlap: bool = True

    @property
    def count(self) -> int:
        return len(self.memory_bytes)


def make_workers(
    count: int,
    *,
    bandwidth_bytes_per_s: float | None = None,
    memory_bytes: ArrayLike | None = None,
    in_flight: ArrayLike | None = None,
    **more: Any,
) -> Workers:
    """Workers that are alike.

    Args:
        count: W.
        bandwidth_bytes_per_s: Of every link, each way; None: communication costs nothing.
        memory_bytes: Of every worker; None: no limit.
        in_flight: Micro-batches at once; default those of 1F1B, W for the first worker down to 1 for the last.
        **more: Other fields of `Workers`.

    Raises:
        InputError: No worker, or a bandwidth that is not positive.
    """
    whole_number(count, "workers: count", 1)
    if bandwidth_bytes_per_s is not None and not bandwidth_bytes_per_s > 0:
        raise InputError(f"workers: bandwidth_bytes_per_s must be positive, found {show(bandwidth_bytes_per_s)}")
    inverse = 0.0 if bandwidth_bytes_per_s is None else 1.0 / bandwidth_bytes_per_s
    limit = np.inf if memory_bytes is None else memory_bytes
    flight = np.arange(count, 0, -1) if in_flight is None else in_flight
    return Workers(
        np.full(count, inverse),
        np.array(np.broadcast_to(np.asarray(limit, dtype=np.float64), (count,))),
        np.array(np.broadcast_to(np.asarray(flight, dtype=np.int64), (count,))),
        **more,
    )


@dataclass(frozen=True)
class Cuts:
    """Who runs what: worker i has the forward pass of layers ``forward[i]`` up to ``forward[i + 1]``, and so on.

    Attributes:
        forward, backward: W + 1 offsets into the layers, from 0 to L.
        bottleneck_s: The largest cost of a worker for one micro-batch: the inverse of the throughput in steady state.
        worker_s: W costs.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    bottleneck_s: float
    worker_s: tuple[float, ...] = field(default=(), repr=False)

    @property
    def gap(self) -> int:
        """The largest distance between a forward cut and its backward cut, in layers."""
        return max(abs(p - q) for p, q in zip(self.forward, self.backward, strict=True))

    @property
    def displaced(self) -> tuple[int, ...]:
        """Layers whose forward and backward pass run on different workers."""
        ahead, back = (np.repeat(np.arange(len(c) - 1), np.diff(c)) for c in (self.forward, self.backward))
        return tuple(np.flatnonzero(ahead != back).tolist())
