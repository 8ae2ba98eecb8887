"""What one process does in a step: the passes of its device in order, with what arrives before and what is sent afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from rlplace.runtime.distributed.graph.cut import Cut
from rlplace.runtime.distributed.graph.order import Step

AHEAD = 2
"""Receives of segments are posted for this turn and the next."""

Run = TypeVar("Run")


class Value(NamedTuple):
    """What passes make and read.

    Attributes:
        of: What makes it.
        microbatch: Number in the step; -1: once per step.
        reader: The device whose part of its gradient this is; None: the value itself.
    """

    of: Any
    microbatch: int
    reader: int | None = None


@dataclass(frozen=True)
class Pass(Generic[Run]):
    """A part of a step, on one device of the plan.

    Attributes:
        run: What is run.
        device: Where.
        reads: Values that it needs.
        makes: Values that no other pass makes.
    """

    run: Run
    device: int
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]


@dataclass(frozen=True)
class Message:
    """A value or its gradient on its way between two processes.

    Attributes:
        value: What makes it.
        microbatch: Number in the step; -1: once per step.
        source, destination: Devices of the plan.
        tag: Unique in the step, ascending in the order in which a source sends.
        gradient: The gradient of the value, else the value.
    """

    value: Any
    microbatch: int
    source: int
    destination: int
    tag: int
    gradient: bool = False

    def __str__(self) -> str:
        text = f"{'the gradient of ' if self.gradient else ''}{str(self.value)!r}"
        return text if self.microbatch < 0 else f"{text} of micro-batch {self.microbatch}"


@dataclass(frozen=True)
class Turn(Generic[Run]):
    """What this process does at one point of a step.

    Attributes:
        run: What the pass runs.
        posts: Receives to start before anything else.
        needs: Messages that must have arrived before the pass runs.
        sends: Messages to send afterwards.
        frees: Values that nobody here reads afterwards, with their micro-batch.
    """

    run: Run
    posts: tuple[Message, ...]
    needs: tuple[Message, ...]
    sends: tuple[Message, ...]
    frees: tuple[tuple[Any, int], ...]


def turns_of(
    passes: Sequence[Pass[Run]], plan_device: int, ahead: int, kept: Callable[[Value], bool] = lambda value: False
) -> list[Turn[Run]]:
    """The part of one process in a step. A value goes once to each other device that reads it, as soon as it is made.

    Args:
        passes: Of all devices, makers before readers.
        plan_device: The process, as a device of the plan.
        ahead: See `posts_of`.
        kept: Which values are not forgotten after their last use.
    """
    made = {value: (index, place) for index, one in enumerate(passes) for place, value in enumerate(one.makes)}
    first: dict[tuple[Value, int], int] = {}
    last: dict[Value, int] = {}
    for index, one in enumerate(passes):
        for value in one.reads:
            if passes[made[value][0]].device != one.device:
                first.setdefault((value, one.device), index)
        if one.device == plan_device:
            last.update(dict.fromkeys((*one.makes, *one.reads), index))
    leaving: dict[int, list[Message]] = {}
    arriving: dict[int, list[Message]] = {}
    for tag, (value, there) in enumerate(sorted(first, key=lambda pair: (*made[pair[0]], pair[1])), 1):
        maker = made[value][0]
        sent = Message(value.of, value.microbatch, passes[maker].device, there, tag, value.reader is not None)
        leaving.setdefault(maker, []).append(sent)
        arriving.setdefault(first[value, there], []).append(sent)
    frees: dict[int, list[tuple[Any, int]]] = {}
    for value, index in last.items():
        if value.reader is None and not kept(value):
            frees.setdefault(index, []).append((value.of, value.microbatch))
    mine = [index for index, one in enumerate(passes) if one.device == plan_device]
    needs = [tuple(arriving.get(index, ())) for index in mine]
    return [
        Turn(passes[index].run, posts, need, tuple(leaving.get(index, ())), tuple(frees.get(index, ())))
        for index, posts, need in zip(mine, posts_of(needs, ahead), needs, strict=True)
    ]


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


def segment_turns(cut: Cut, order: Sequence[Step], plan_device: int) -> list[Turn[Step]]:
    """The part of one process in a step of a cut.

    Between its turns it keeps what needs a gradient and, in a step without a backward, what the model returns.

    Args:
        cut: The segments.
        order: All passes, see `step_order`.
        plan_device: The process, as a device of the plan.
    """
    layout = cut.graph.layout
    device_of = [segment.placement.device for segment in cut.segments]
    trains = {step.segment for step in order if step.backward}
    last_reader = {
        (value, step.microbatch, device_of[step.segment]): step
        for step in order
        if step.backward
        for value in cut.segments[step.segment].reads
    }
    gradients: dict[tuple[str, int], list[Value]] = {}
    passes: list[Pass[Step]] = []
    for step in order:
        here, number, segment = device_of[step.segment], step.microbatch, cut.segments[step.segment]
        if not step.backward:
            reads = tuple(Value(value, number) for value in segment.reads)
            passes.append(Pass(step, here, reads, tuple(Value(value, number) for value in segment.makes)))
            continue
        makes = []
        for value in segment.reads:
            goes = layout[value].requires_grad and device_of[cut.maker[value]] != here and cut.maker[value] in trains
            if goes and last_reader[value, number, here] is step:
                makes.append(Value(value, number, here))
                gradients.setdefault((value, number), []).append(makes[-1])
        of_made = [gradient for value in segment.makes for gradient in gradients.get((value, number), ())]
        passes.append(Pass(step, here, tuple(of_made), tuple(makes)))
    kept = set() if trains else {*filter(lambda item: isinstance(item, str), cut.graph.outputs), cut.graph.loss}
    return turns_of(
        passes, plan_device, AHEAD, lambda value: value.of in kept or bool(trains and layout[value.of].requires_grad)
    )
