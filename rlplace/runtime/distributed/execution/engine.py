"""What an engine is: it runs the steps of one plan on this process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.order import Expected
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own

KINDS = ("forward", "backward", "wait", "reduce", "update")
_TEXT = {"reduce": "the sum of gradients over ranks", "update": "the optimizer"}


@dataclass(frozen=True)
class Event:
    """An interval.

    Attributes:
        kind: One of `KINDS`: passes of segments; waiting for other processes; adding up gradients; the optimizer.
        start_s, end_s: By the host's monotonic clock.
        segment, microbatch: What a pass or wait is for, else -1.
    """

    kind: str
    start_s: float
    end_s: float
    segment: int = -1
    microbatch: int = -1

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(eq=False)
class Recorder:
    """Collects events while it is on.

    Attributes:
        device: Waited for at the end of every interval where work is queued on it.
        on: Whether to record; off, intervals cost nothing.
        events: What was recorded.
    """

    device: torch.device
    on: bool = False
    events: list[Event] = field(default_factory=list)

    @contextmanager
    def interval(self, kind: str, segment: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Records the time that its body takes, and notes it as what this process is doing."""
        if segment >= 0 and kind != "wait":
            activity.doing("the {} of segment {} (micro-batch {})", kind, segment, microbatch)
        elif kind in _TEXT:
            activity.doing(_TEXT[kind])
        if not self.on:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.events.append(Event(kind, start, time.perf_counter(), segment, microbatch))

    def take(self) -> list[Event]:
        """The events so far, and forgets them."""
        taken, self.events = self.events, []
        return taken


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
    """

    schedule: str
    expected: Expected | None = None


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


@dataclass(frozen=True, eq=False)
class Setup:
    """What `rlplace.distribute` was given.

    Attributes:
        model: The whole model, with values.
        plan: The plan.
        graph: Its forward graph for the example inputs.
        ranks: The processes.
        problem: What the plan was made for, where the caller has it.
        replayed: The problem whose times a replay sleeps; None: `problem`.
    """

    model: nn.Module
    plan: PlacementPlan
    graph: ForwardGraph
    ranks: Ranks
    problem: Problem | None
    replayed: Problem | None = None


@dataclass(frozen=True, eq=False)
class ChosenEngine:
    """An engine chosen for a plan.

    Attributes:
        name: The engine's name.
        own: What this process holds.
        engine_for: Makes the engine for the graph of one signature of inputs; must not hold on to the whole model.
    """

    name: str
    own: Own
    engine_for: Callable[[ForwardGraph], Engine]
