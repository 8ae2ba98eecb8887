"""What an engine is: it runs the steps of one plan on this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlplace.runtime.distributed.execution.events import Recorder
from rlplace.runtime.distributed.graph.order import Expected


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One pass over the model.

    Attributes:
        number: In the global batch, over all replicas; names its random streams.
        leaves: Flat inputs, see `flat_inputs`; the same on every rank of a replica.
        weight: Share of its mean loss in the loss of the step; the shares of all micro-batches of all replicas add up to 1.
    """

    number: int
    leaves: Sequence[Any]
    weight: float


@dataclass(frozen=True, eq=False)
class StepOptions:
    """How an engine is to run its steps.

    Attributes:
        schedule: The plan's schedule.
        expected: Times of the priced problem, by which passes are ordered; None: by the sizes of their values.
        recompute: Number of the plan's recompute segment by node name, see `recompute_sets`.
        optimizer_sharding: Whether replicas share the optimizer's work.
    """

    schedule: str
    expected: Expected | None = None
    recompute: Mapping[str, int] | None = None
    optimizer_sharding: bool = False


class Engine(ABC):
    """Runs steps of one plan for one signature of inputs.

    All ranks of a replica call the same methods in the same order with the same micro-batches.

    Attributes:
        parameters: The parameters that this rank owns, by first name: those it reads and updates. A parameter that several
            ranks own is kept equal by equal gradients.
        buffers: Likewise buffers and constants.
        recorder: Takes the intervals of a step, once it is switched on.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    recorder: Recorder

    @abstractmethod
    def train(self, microbatches: Sequence[Microbatch], seed: int, step: int) -> torch.Tensor:
        """Forward and backward of all micro-batches of this replica.

        Afterwards ``.grad`` of every own parameter holds the gradient of the step's loss over all replicas (it is None on
        entry; it stays None, on every rank alike, for a parameter without any gradient).

        Returns:
            The loss of the step over all replicas, 0-d, detached, the same on every rank.
        """

    @abstractmethod
    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[list[Any]]:
        """Forward only, without gradients.

        Returns:
            Per micro-batch of this replica the flat outputs of the model (its loss node last, when the graph has a loss
            function outside the model), on every rank of the replica.
        """


def zero_loss(dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """Where the loss of a step adds up: in double precision for a loss in double precision, else in single."""
    return torch.zeros((), device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def to_device(leaf: Any, device: torch.device) -> Any:
    """An input where it is needed; what is no tensor stays as it is."""
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
