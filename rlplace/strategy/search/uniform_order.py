"""In which order uniform strategies are tried, and what is left out.

They are what practice writes into configuration files, so searched through they are the floor for everything else. Those that
may fit come first, the quickest by an estimate before others; what has a bound above the best so far is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rlplace.strategy.kinds import KINDS
from rlplace.strategy.search.cuts import Balance
from rlplace.strategy.search.fit import fitted
from rlplace.strategy.search.shapes import device_sets
from rlplace.strategy.search.tries import Question, Tried, Tries
from rlplace.strategy.search.uniform import Option, Options

FEW = 32
"""Devices of a cluster of which all sets are looked at from the beginning."""

TURN = 3
"""Options by their estimates for each one by its family."""

RIVALS = 4
"""Drafts of every kind with one dimension that are evaluated before all others, so that an answer can name its rivals."""


def try_rivals(tries: Tries, options: Sequence[Option], balance: Balance) -> Iterator[Tried | None]:
    """The first `RIVALS` of every kind with one dimension, as they fit; None for those that do not.

    Raises:
        OutOfBudgetError: The budget ended before all were looked at.
    """
    rivals = dict.fromkeys(KINDS, 0)
    for option in options:
        if rivals.get(option.shape.kind, RIVALS) < RIVALS:
            rivals[option.shape.kind] += 1
            yield fitted(tries, option.draft(balance))


def try_uniform(tries: Tries, options: Sequence[Option], balance: Balance) -> Iterator[Tried | None]:
    """Uniform strategies as they fit; None for those that do not. What cannot beat the best is left out; raises likewise.

    The lowest estimates come first, and every `TURN`-th time the first of the next family, a family being of one kind, tensor
    and pipeline degree and micro-batch size.
    """
    families: dict[tuple[object, ...], Option] = {}
    for option in options:
        shape = option.shape
        families.setdefault((shape.kind, shape.axes.tensor, shape.places, max(option.sizes)), option)
    firsts, looked_at = list(families.values()), set[int]()
    for number, option in enumerate(options):
        for one in [option, *firsts[number // TURN :][: number % TURN == 0]]:
            if id(one) not in looked_at:
                looked_at.add(id(one))
                if one.bound_s < tries.best_s:
                    yield fitted(tries, one.draft(balance), tries.best_s)


def by_sets(question: Question, balance: Balance) -> tuple[list[Option], list[Option], Callable[[], list[Option]]]:
    """Options in the order of `Option.key`; made when asked for: the last.

    To begin with, those of kinds with one dimension, and all others. In large clusters the first leave no device of a kind out
    unless it leaves out all: the rest takes longer, mostly.
    """
    cluster, sets, every = question.cluster, device_sets(question.cluster), Options(question, balance).every
    kind = [one.name for one in cluster.kinds]
    whole = [own for own in sets if len(own) == sum(map(kind.count, {kind[device] for device in own}))]
    if cluster.num_devices <= FEW:
        whole = sets
    first, rest = sorted(every(whole), key=Option.key), [own for own in sets if own not in whole]
    return first, sorted(every(sets, KINDS), key=Option.key) if rest else first, lambda: sorted(every(rest), key=Option.key)
