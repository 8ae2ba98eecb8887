"""The order in which uniform strategies are tried: the lowest estimate first, families in turn, rivals of every kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlplace.budget import Budget
from rlplace.strategy.drafts import KINDS, Devices
from rlplace.strategy.search.fit import fitted
from rlplace.strategy.search.promise import Promises
from rlplace.strategy.search.shapes import Degrees, Forms, device_sets
from rlplace.strategy.search.tries import NEAR, SearchProblem, Tried, Tries
from rlplace.strategy.search.uniform import Division, Option, UniformOptions

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


PROMISING = 1.3
"""Promises that take at most so many times as long as the best are listed by their cut of passes."""


WAIT = 20
"""Groups of a set of devices after which another set, whose promises are twice as long, has its turn."""


class Listed(NamedTuple):
    """Uniform strategies in the order of `Option.key`.

    Attributes:
        first: Those that come first.
        rivals: Those of kinds with one dimension.
        complete: Whether of every such kind either something that may fit was listed, or all.
        rest: Lists the others, a few at a time.
    """

    first: list[Option]
    rivals: list[Option]
    complete: bool
    rest: Callable[[], Iterator[list[Option]]]


def listed(problem: SearchProblem, seconds: float = math.inf) -> Listed:
    """Lists uniform strategies, the most promising groups first (`rlplace.strategy.search.promise`).

    Left to the rest are groups whose promise is longer than what a strategy that fits is expected
    to take, but for kinds with one dimension of which none fits so far; and in a group other forms of tensor and context
    parallelism, where the usual ones are not near the best. On all devices what cuts no layer is listed, and what cuts layers
    over the largest tensor groups, as long as nothing fits, whatever the time.

    Args:
        problem: The problem.
        seconds: After these whatever is not yet listed is left to the rest.
    """
    options, budget, sets = UniformOptions(problem), Budget(seconds=seconds), device_sets(problem)
    groups = _groups({devices: options.divisions(devices) for devices in sets}, Promises(problem))
    largest = max((group.degrees.tensor for group in groups), default=1)
    first: list[Option] = []
    later: list[list[Division]] = []
    unfit, missed = dict[str, bool](), set[str]()
    least_s = math.inf
    for promised_s, devices, degrees, forms in groups:
        basic = degrees.context == degrees.expert == 1 and degrees.tensor in (1, largest) and devices is next(iter(sets))
        rival = sum(degree > 1 for degree in degrees) <= 1
        near_s = math.inf
        for form in forms:
            best_s, left = math.inf, list[Division]()
            wanted = promised_s < least_s and (near_s == math.inf or near_s < NEAR * least_s)
            for division in (Division(devices, degrees.places, axes) for axes in form):
                lacking = rival and division.kind in KINDS and unfit.setdefault(division.kind, True)
                if not ((basic and least_s == math.inf) or ((wanted or lacking) and budget.left_s() > 0.0)):
                    left.append(division)
                    missed |= {division.kind} if lacking else set()
                    continue
                own = list(options.of(division))
                first += own
                own_s = min((one.expected_s for one in own if one.short_bytes <= 0.0), default=math.inf)
                if lacking and own_s < math.inf:
                    unfit[division.kind] = False
                best_s = min(best_s, own_s)
            least_s, near_s = min(least_s, best_s), min(near_s, best_s)
            later.append(left)

    def rest() -> Iterator[list[Option]]:
        for own in later:
            yield sorted((option for division in own for option in options.of(division)), key=Option.key)

    first.sort(key=Option.key)
    rivals = [option for option in first if option.shape.kind in KINDS]
    return Listed(first, rivals, not any(unfit[kind] for kind in missed), rest)


class _Promised(NamedTuple):
    """Uniform strategies whose passes cost about the same; see `rlplace.strategy.search.promise`."""

    promised_s: float
    devices: Devices
    degrees: Degrees
    forms: Forms


def _groups(sets: Mapping[Devices, Mapping[Degrees, Forms]], promises: Promises) -> list[_Promised]:
    """Returns groups in the order of listing.

    Promises near the best come by their cut of passes, which is priced once, and sets of devices take turns in each.
    """
    groups = [
        _Promised(promises.step_s(devices, degrees), devices, degrees, forms)
        for devices, own in sets.items()
        for degrees, forms in own.items()
    ]
    groups.sort(key=lambda group: group.promised_s)
    near_s = PROMISING * min((group.promised_s for group in groups), default=0.0)
    cuts = {(1, 1, 1, 1): 0}  # whatever cuts nothing has its prices first
    turns: Counter[tuple[object, ...]] = Counter()
    keyed: list[tuple[int, float, _Promised]] = []
    for group in groups:
        cut, turn = group.degrees[1:], (group.devices, group.degrees[1:])
        number = cuts.setdefault(cut, len(cuts)) if group.promised_s <= near_s else len(groups)
        keyed.append((number, group.promised_s * (1.0 + turns[turn] / WAIT), group))
        turns[turn] += 1
    return [group for *_, group in sorted(keyed, key=lambda item: item[:2])]
