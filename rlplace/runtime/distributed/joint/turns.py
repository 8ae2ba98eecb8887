"""What one process does in a step: the passes of its device in order, with what arrives before and what is sent afterwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

AHEAD = 32
"""Receives are posted this many turns before their values are needed."""


@dataclass(frozen=True)
class Pass:
    """A part of a step, on one device of the plan.

    Attributes:
        run: What is run.
        device: Where.
        reads: Values that it needs.
        makes: Values that no other pass makes.
    """

    run: Any
    device: int
    reads: tuple[Hashable, ...]
    makes: tuple[Hashable, ...]


@dataclass(frozen=True)
class Message:
    """A value on its way between two processes.

    Attributes:
        value: What it is; its text names it.
        source, destination: Devices of the plan.
        tag: Unique in the step, ascending in the order in which a source sends.
    """

    value: Any
    source: int
    destination: int
    tag: int

    def __str__(self) -> str:
        return repr(str(self.value))


@dataclass(frozen=True)
class Turn:
    """What this process does at one point of a step.

    Attributes:
        run: What the pass runs.
        posts: Receives to start before anything else.
        needs: Messages that must have arrived before the pass runs.
        sends: Messages to send afterwards.
        frees: Values that nobody here reads afterwards.
    """

    run: Any
    posts: tuple[Message, ...]
    needs: tuple[Message, ...]
    sends: tuple[Message, ...]
    frees: tuple[Any, ...]


def turns_of(passes: Sequence[Pass], plan_device: int, kept: Callable[[Any], bool]) -> list[Turn]:
    """The part of one process in a step. A value goes once to each other device that reads it, as soon as it is made.

    Args:
        passes: Of all devices, makers before readers.
        plan_device: The process, as a device of the plan.
        kept: Which values are not forgotten after their last use.
    """
    made = {value: (index, place) for index, one in enumerate(passes) for place, value in enumerate(one.makes)}
    first: dict[tuple[Any, int], int] = {}
    last: dict[Any, int] = {}
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
        sent = Message(value, passes[maker].device, there, tag)
        leaving.setdefault(maker, []).append(sent)
        arriving.setdefault(first[value, there], []).append(sent)
    frees: dict[int, list[Any]] = {}
    for value, index in last.items():
        if not kept(value):
            frees.setdefault(index, []).append(value)
    mine = [index for index, one in enumerate(passes) if one.device == plan_device]
    needs = [tuple(arriving.get(index, ())) for index in mine]
    return [
        Turn(passes[index].run, posts, need, tuple(leaving.get(index, ())), tuple(frees.get(index, ())))
        for index, posts, need in zip(mine, posts_of(needs), needs, strict=True)
    ]


def posts_of(arriving: Sequence[Sequence[Message]]) -> list[tuple[Message, ...]]:
    """Per turn the receives to start before it: some turns before their values are needed, in the order of each sender.

    NCCL knows no tags: it matches the messages of a direction by their order alone. A value that was sent early may be needed
    late, so receives cannot simply follow the order of needs.

    Args:
        arriving: Per turn the messages that must have arrived; each message once.
    """
    lines: dict[int, list[Message]] = {}
    for message in sorted((m for row in arriving for m in row), key=lambda m: m.tag):
        lines.setdefault(message.source, []).append(message)
    position = {message: number for line in lines.values() for number, message in enumerate(line)}
    posted = dict.fromkeys(lines, 0)
    posts: list[tuple[Message, ...]] = []
    for at in range(len(arriving)):
        started: list[Message] = []
        for row in arriving[0 if at == 0 else at + AHEAD - 1 : at + AHEAD]:
            for message in row:
                upto = position[message] + 1
                started += lines[message.source][posted[message.source] : upto]
                posted[message.source] = max(posted[message.source], upto)
        posts.append(tuple(started))
    return posts
