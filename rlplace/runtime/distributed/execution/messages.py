"""Messages between the processes of a replica: what travels, what one step keeps of it, and when receives are started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from rlplace.runtime.distributed.execution.engine import Microbatch
from rlplace.runtime.distributed.execution.wire import Wire


@dataclass(frozen=True)
class Message:
    """A value or its gradient on its way between two processes.

    Attributes:
        value: Name of the node that makes it.
        microbatch: Number in the step; -1: a held tensor, once per step.
        source, destination: Devices of the plan.
        tag: Unique in the step, ascending in the order in which a source sends.
        gradient: The gradient of the value, else the value.
    """

    value: str
    microbatch: int
    source: int
    destination: int
    tag: int
    gradient: bool = False

    def __str__(self) -> str:
        text = f"{'the gradient of ' if self.gradient else ''}{self.value!r}"
        return text if self.microbatch < 0 else f"{text} of micro-batch {self.microbatch}"


Pass = TypeVar("Pass")


@dataclass(frozen=True)
class Turn(Generic[Pass]):
    """What this process does at one point of a step.

    Attributes:
        run: The pass of a segment, or the node, to run.
        posts: Receives to start before anything else.
        needs: Messages that must have arrived before the pass runs.
        sends: Messages to send afterwards.
        frees: Values that nobody here reads afterwards, with their micro-batch.
    """

    run: Pass
    posts: tuple[Message, ...]
    needs: tuple[Message, ...]
    sends: tuple[Message, ...]
    frees: tuple[tuple[Any, int], ...]


@dataclass(eq=False)
class StepState:
    """What one step keeps between its turns; values go by what makes them and by micro-batch."""

    microbatches: Sequence[Microbatch]
    wire: Wire
    loss: torch.Tensor
    values: dict[tuple[Any, int], Any] = field(default_factory=dict)
    leaves: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    gradients: dict[tuple[str, Any], torch.Tensor] = field(default_factory=dict)
    pending: dict[Message, tuple[Any, torch.Tensor]] = field(default_factory=dict)


def posts_of(arriving: Sequence[Sequence[Message]], ahead: int) -> list[tuple[Message, ...]]:
    """Per turn the receives to start before it: some turns before their values are needed, in the order of each sender.

    NCCL knows no tags: it matches the messages of a direction by their order alone. A value that was sent early may be needed
    late, so receives cannot simply follow the order of needs.

    Args:
        arriving: Per turn the messages that must have arrived; each message once.
        ahead: Receives start this many turns before the turn that needs them ends; 1 starts them right before it.
    """
    lines: dict[int, list[Message]] = {}
    for message in sorted((m for row in arriving for m in row), key=lambda m: m.tag):
        lines.setdefault(message.source, []).append(message)
    position = {message: number for line in lines.values() for number, message in enumerate(line)}
    posted = dict.fromkeys(lines, 0)
    posts: list[tuple[Message, ...]] = []
    for at in range(len(arriving)):
        started: list[Message] = []
        for row in arriving[0 if at == 0 else at + ahead - 1 : at + ahead]:
            for message in row:
                upto = position[message] + 1
                started += lines[message.source][posted[message.source] : upto]
                posted[message.source] = max(posted[message.source], upto)
        posts.append(tuple(started))
    return posts
