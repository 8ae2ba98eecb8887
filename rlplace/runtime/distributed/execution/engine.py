"""What an engine is: it runs the steps of one plan on this process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.gradients import sum_gradients
from rlplace.runtime.distributed.execution.turns import Message, Turn
from rlplace.runtime.distributed.execution.wire import Wire
from rlplace.runtime.distributed.graph.layouts import Layout
from rlplace.runtime.distributed.ranks import Ranks, group_of
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


@dataclass(eq=False)
class StepState:
    """What one step keeps between its turns; values go by what makes them and by micro-batch."""

    microbatches: Sequence[Microbatch]
    wire: Wire
    loss: torch.Tensor
    values: dict[tuple[Any, int], Any] = field(default_factory=dict)
    leaves: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    gradients: dict[tuple[Any, Any], torch.Tensor] = field(default_factory=dict)
    pending: dict[Message, tuple[Any, torch.Tensor]] = field(default_factory=dict)


class Engine(ABC):
    """Runs this process's turns of the steps of one plan, for one signature of inputs.

    All ranks of a replica call the same methods in the same order with the same micro-batches.

    Attributes:
        ranks: Which process this is.
        parameters: The parameters that this rank owns, by first name: those it reads and updates. A parameter that several
            ranks own is kept equal by equal gradients.
        buffers: Likewise buffers and constants.
        owners: Devices of the plan that hold a tensor, by name.
        recorder: Takes the intervals of a step, once it is switched on.
    """

    def __init__(self, ranks: Ranks, own: Own, loss_dtype: torch.dtype | None) -> None:
        self.ranks, self._loss_dtype = ranks, loss_dtype
        self.parameters, self.buffers, self.owners = own.parameters, own.buffers, own.owners
        self.recorder = Recorder(ranks.device)
        self._programs: dict[tuple[int, bool], Sequence[Turn[Any]]] = {}

    def train(self, microbatches: Sequence[Microbatch], seed: int, step: int) -> torch.Tensor:
        """Forward and backward of all micro-batches of this replica.

        Afterwards ``.grad`` of every own parameter holds the gradient of the step's loss over all replicas (it is None on
        entry; it stays None, on every rank alike, for a parameter without any gradient).

        Returns:
            The loss of the step over all replicas, 0-d, detached, the same on every rank.
        """
        state = self._run(microbatches, training=True, seed=seed, step=step)
        with self.recorder.interval("reduce"):
            if self.ranks.plan_device is not None:
                sum_gradients(self.parameters, self.owners, self.ranks)
        dist.all_reduce(state.loss)
        return state.loss

    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[list[Any]]:
        """Forward only, without gradients.

        Returns:
            Per micro-batch of this replica the flat outputs of the model (its loss node last, when the graph has a loss
            function outside the model), on every rank of the replica.
        """
        with torch.no_grad():
            state = self._run(microbatches, training=False, seed=0, step=0)
        if self.ranks.replica is None:
            return []
        return [[self._output(state, item, number) for item in self._outputs()] for number in range(len(microbatches))]

    def _run(self, microbatches: Sequence[Microbatch], training: bool, seed: int, step: int) -> StepState:
        ranks = self.ranks
        state = StepState(microbatches, Wire(ranks.rank, ranks.device), zero_loss(self._loss_dtype, ranks.device))
        if ranks.plan_device is None:
            return state
        key = (len(microbatches), training)
        if key not in self._programs:
            program = self._programs[key] = self._turns(len(microbatches), training, ranks.plan_device)
            messages = [m for turn in program for m in (*turn.posts, *turn.sends)]
            state.wire.connect([(ranks.rank_of(m.source), ranks.rank_of(m.destination)) for m in messages])
        for turn in self._programs[key]:
            for message in turn.posts:
                source = ranks.rank_of(message.source)
                state.pending[message] = state.wire.receive(self._layout(message.value), source, message.tag, message)
            if turn.needs:
                with self.recorder.interval("wait", *self._numbers(turn.run)):
                    for message in turn.needs:
                        work, value = state.pending.pop(message)
                        work.wait()
                        self._arrive(state, message, value)
            self._pass(state, turn.run, training, seed, step)
            for message in turn.sends:
                value, destination = self._leaving(state, message), ranks.rank_of(message.destination)
                state.wire.send(value, self._layout(message.value), destination, message.tag)
            for gone in turn.frees:
                state.values.pop(gone, None)
                state.leaves.pop(gone, None)
        with self.recorder.interval("wait"):
            state.wire.finish()
        return state

    def _everywhere(self, source: int, value: Callable[[], torch.Tensor], layout: Layout) -> torch.Tensor:
        """A value that one device of the plan has, on every rank of the replica."""
        row = self.ranks.replicas[self.ranks.replica or 0]
        found = value() if source == self.ranks.plan_device else layout.empty(self.ranks.device)
        if len(row) > 1:
            dist.broadcast(found, row[source], group=group_of(row))
        return found

    def _numbers(self, run: Any) -> tuple[int, int]:
        """Segment and micro-batch of a turn, for the recorder."""
        return -1, -1

    @abstractmethod
    def _turns(self, microbatches: int, training: bool, plan_device: int) -> Sequence[Turn[Any]]:
        """This process's part of a step."""

    @abstractmethod
    def _layout(self, value: Any) -> Layout:
        """How a value lies on the wire."""

    @abstractmethod
    def _arrive(self, state: StepState, message: Message, value: torch.Tensor) -> None:
        """A message has come."""

    @abstractmethod
    def _leaving(self, state: StepState, message: Message) -> torch.Tensor:
        """What a message takes along."""

    @abstractmethod
    def _pass(self, state: StepState, run: Any, training: bool, seed: int, step: int) -> None:
        """Runs the pass of a turn."""

    @abstractmethod
    def _outputs(self) -> Sequence[Any]:
        """What `evaluate` returns per micro-batch."""

    @abstractmethod
    def _output(self, state: StepState, item: Any, microbatch: int) -> Any:
        """One of them, on every rank of the replica."""


def zero_loss(dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """Where the loss of a step adds up: in double precision for a loss in double precision, else in single."""
    return torch.zeros((), device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def to_device(leaf: Any, device: torch.device) -> Any:
    """An input where it is needed; what is no tensor stays as it is."""
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
