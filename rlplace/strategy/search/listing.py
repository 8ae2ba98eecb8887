"""The order in which uniform strategies are tried: the lowest estimate first, families in turn, rivals of every kind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rlplace.strategy.costs import Cut
from rlplace.strategy.drafts import KINDS
from rlplace.strategy.search.fit import fitted
from rlplace.strategy.search.shapes import device_sets
from rlplace.strategy.search.tries import SearchProblem, Tried, Tries
from rlplace.strategy.search.uniform import Division, Option, UniformOptions

FEW = 32
"""Devices of a cluster of which all sets are tried from the beginning."""

TURN = 3
"""Options by their estimates for each one by its family."""

RIVALS = 4
"""Drafts of every kind with one dimension that are evaluated before all others, so that a plan can name its rivals."""


def try_rivals(tries: Tries, options: Sequence[Option]) -> Iterator[Tried | None]:
    """Yields the first `RIVALS` of every kind with one dimension, as they fit; None for those that do not.

    Raises:
        OutOfBudgetError: The budget ended before.
    """
    rivals = dict.fromkeys(KINDS, 0)
    for option in options:
        if rivals.get(option.shape.kind, RIVALS) < RIVALS:
            rivals[option.shape.kind] += 1
            yield fitted(tries, option.draft(tries.problem.balance))


def try_uniform(tries: Tries, options: Sequence[Option]) -> Iterator[Tried | None]:
    """Yields uniform strategies as they fit, None for those that do not, if they may beat the best; raises likewise.

    The lowest estimates come first, and every `TURN`-th time the first of the next family, a family being of one kind, tensor
    and pipeline degree and micro-batch size.
    """
    families: dict[tuple[object, ...], Option] = {}
    for option in options:
        shape = option.shape
        families.setdefault((shape.kind, shape.axes.tensor, shape.places, max(option.sizes)), option)
    firsts, seen = list(families.values()), set[int]()
    for number, option in enumerate(options):
        for one in [option, *firsts[number // TURN :][: number % TURN == 0]]:
            if id(one) not in seen:
                seen.add(id(one))
                if one.bound_s < tries.best_s:
                    yield fitted(tries, one.draft(tries.problem.balance), tries.best_s)


class Listed(NamedTuple):
    """Uniform strategies in the order of `Option.key`.

    Attributes:
        first: Those that come first.
        rivals: Those of kinds with one dimension.
        complete: Whether all of both were listed.
        rest: Lists the others.
    """

    first: list[Option]
    rivals: list[Option]
    complete: bool
    rest: Callable[[], list[Option]]


def listed(problem: SearchProblem, seconds: float = math.inf) -> Listed:
    """Lists uniform strategies.

    In large clusters the first leave no device of a kind out unless they leave out all: the rest takes longer, mostly. On all
    devices, what cuts no layer is always listed, and what cuts layers over the largest tensor groups.

    Args:
        problem: The problem.
        seconds: After these whatever is not yet listed is left to the rest.
    """
    cluster, options, ends_s = problem.cluster, UniformOptions(problem), time.monotonic() + seconds
    sets = device_sets(problem)
    whole, largest = {own for own, every in sets.items() if every or cluster.num_devices <= FEW}, next(iter(sets), None)
    first: list[Option] = []
    rivals: list[Option] = []
    later: list[Division] = []
    late = False
    divided = options.divisions(sets)
    plain = {Cut(1), next((one.axes.cut(1) for one in divided if one.axes.tensor > 1), Cut(1))}
    for division in divided:
        chosen, rival = division.devices in whole, division.kind in KINDS
        now = time.monotonic() < ends_s or (division.axes.cut(1) in plain and division.devices is largest)
        if now and (chosen or rival):
            found = list(options.of(division))
            first += found if chosen else ()
            rivals += found if rival else ()
        else:
            late |= chosen or rival
        if not (now and chosen):
            later.append(division)

    def rest() -> list[Option]:
        return sorted((option for division in later for option in options.of(division)), key=Option.key)

    return Listed(sorted(first, key=Option.key), sorted(rivals, key=Option.key), not late, rest)
