"""When receives are started: some turns before their values are needed, and in the order in which each sender sends.

NCCL knows no tags: it matches the messages of a direction by their order alone. A value that was sent early may be needed late,
so receives cannot simply follow the order of needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar


class Sent(Hashable, Protocol):
    """A message to this process.

    Attributes:
        source: Who sends it.
        tag: Ascending in the order in which a source sends.
    """

    @property
    def source(self) -> int: ...

    @property
    def tag(self) -> int: ...


M = TypeVar("M", bound=Sent)


def posts_of(arriving: Sequence[Sequence[M]], ahead: int) -> list[tuple[M, ...]]:
    """Per turn the receives to start before it.

    Args:
        arriving: Per turn the messages that must have arrived; each message once.
        ahead: Receives start this many turns before the turn that needs them ends; 1 starts them right before it.
    """
    lines: dict[int, list[M]] = {}
    for message in sorted((m for row in arriving for m in row), key=lambda m: m.tag):
        lines.setdefault(message.source, []).append(message)
    position = {message: number for line in lines.values() for number, message in enumerate(line)}
    posted = dict.fromkeys(lines, 0)
    posts: list[tuple[M, ...]] = []
    for at in range(len(arriving)):
        started: list[M] = []
        for row in arriving[0 if at == 0 else at + ahead - 1 : at + ahead]:
            for message in row:
                upto = position[message] + 1
                started += lines[message.source][posted[message.source] : upto]
                posted[message.source] = max(posted[message.source], upto)
        posts.append(tuple(started))
    return posts
