"""A chain of layers as bi-partition sees it: what each layer costs, sends and keeps, and the workers that share it out.

Axes used below: L layers, W workers in pipeline order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import whole_number


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


@dataclass(frozen=True, eq=False)
class Workers:
    """The pipeline that the layers are shared out to; a worker computes while it transfers and takes the longer of the two.

    Attributes:
        seconds_per_byte: float64 [W], of each worker's link; 0: communication costs nothing.
        memory_bytes: float64 [W], inf where there is no limit.
        in_flight: int64 [W], micro-batches whose stash a worker holds at once.
        weight_share: Times that displaced weights travel per micro-batch: 1 where every micro-batch updates them
            (PipeDream), 1 / M where one step has M micro-batches.
    """

    seconds_per_byte: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    in_flight: NDArray[np.int64]
    weight_share: float = 1.0

    @property
    def count(self) -> int:
        return len(self.memory_bytes)


def free_workers(count: int) -> Workers:
    """So many workers without communication costs and memory limits.

    Raises:
        InputError: No worker.
    """
    whole_number(count, "workers: count", 1)
    return Workers(np.zeros(count), np.full(count, np.inf), np.arange(count, 0, -1))


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
        forward, backward = (np.repeat(np.arange(len(c) - 1), np.diff(c)) for c in (self.forward, self.backward))
        return tuple(np.flatnonzero(forward != backward).tolist())
