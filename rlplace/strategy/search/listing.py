"""The order in which uniform strategies are tried: the lowest estimate first, families in turn, rivals of every kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.budget import Budget
from rlplace.strategy.drafts import KINDS, Devices, Mesh
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


NEW_CUT = 1.15
"""Groups whose cut of passes has no prices yet are held to take so many times as long."""

TRUST = 1
"""Groups after which half of what they took beyond their promises is expected of others."""

UNFIT = 1.3
"""Expected seconds over promised ones where nothing fitted so far."""


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


def listed(problem: SearchProblem, seconds: float = math.inf, *, in_time: bool = False) -> Listed:
    """Lists uniform strategies, the most promising groups first (`rlplace.strategy.search.promise`).

    Left to the rest are groups whose promise is longer than what a strategy that fits is expected to take, but for kinds with
    one dimension of which none fits so far; and in a group other forms of tensor and context parallelism, where the usual ones
    are not near the best. On all devices what cuts no layer is listed, and what cuts layers
    over the largest tensor groups, as long as nothing fits, whatever the time.

    Args:
        problem: The problem.
        seconds: After these whatever is not yet listed is left to the rest.
        in_time: Whether that holds after the first group, though nothing may fit so far.
    """
    options, budget, sets = UniformOptions(problem), Budget(seconds=seconds), device_sets(problem)
    queue = _Queue({devices: options.divisions(devices) for devices in sets}, Promises(problem), budget)
    largest = max((group.degrees.tensor for group in queue.groups), default=1)
    first: list[Option] = []
    later: list[_Alike | list[Division]] = []
    unfit, missed = dict[str, bool](), set[str]()
    least_s = math.inf
    for number in queue:
        group, promised_s = queue.groups[number], float(queue.promised_s[number])
        degrees = group.degrees
        rival = sum(degree > 1 for degree in degrees) <= 1
        enough = least_s < math.inf or (in_time and len(first) > 0)
        if not rival and enough and budget.left_s() <= 0.0:
            later.append(group)
            continue
        basic = degrees.context == degrees.expert == 1 and degrees.tensor in (1, largest) and group.devices is next(iter(sets))
        near_s, known = math.inf, len(first)
        for form in group.forms:
            best_s, left = math.inf, list[Division]()
            wanted = promised_s < least_s and (near_s == math.inf or near_s < NEAR * least_s)
            for division in group.divisions(form):
                lacking = rival and division.kind in KINDS and unfit.setdefault(division.kind, True)
                if not ((basic and not enough) or ((wanted or lacking) and budget.left_s() > 0.0)):
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
        if len(first) > known:
            queue.learn(number, near_s)

    def rest() -> Iterator[list[Option]]:
        for some in later:
            for own in map(some.divisions, some.forms) if isinstance(some, _Alike) else (some,):
                yield sorted((option for division in own for option in options.of(division)), key=Option.key)

    first.sort(key=Option.key)
    rivals = [option for option in first if option.shape.kind in KINDS]
    return Listed(first, rivals, not any(unfit[kind] for kind in missed), rest)


class _Alike(NamedTuple):
    """Uniform strategies whose passes cost about the same; see `rlplace.strategy.search.promise`."""

    devices: Devices
    degrees: Degrees
    forms: Forms

    def divisions(self, form: tuple[Mesh, ...]) -> list[Division]:
        """Returns the divisions of one of its forms."""
        return [Division(self.devices, self.degrees.places, axes) for axes in form]


class _Queue:
    """Groups, the one next that is expected to be the quickest after those before it.

    A group is expected to take as many times its promise as the best of the same set of devices did, in a pipeline or without,
    or of those with the same tensor and context degrees, expert degree or places among them; little is concluded from few.

    Attributes:
        groups: All of them.
        promised_s: float64 [G], their promises; without collectives until one is about to be the next.
    """

    def __init__(self, sets: Mapping[Devices, Mapping[Degrees, Forms]], promises: Promises, budget: Budget) -> None:
        self.groups = [_Alike(devices, *group) for devices, own in sets.items() for group in own.items()]
        self.promised_s = np.array([promises.step_s(devices, degrees, free=True) for devices, degrees, _ in self.groups])
        self._promises, self._budget, self._exact = promises, budget, np.full(len(self.groups), False)
        of_set = {devices: number for number, devices in enumerate(sets)}
        rows = [(2 * of_set[group.devices] + (group.degrees.places > 1), *group.degrees) for group in self.groups]
        at = {name: number for number, name in enumerate(("set", *Degrees._fields))}  # stages or not
        facts = np.array(rows, dtype=np.int64).reshape(-1, len(at))

        def numbered(*names: str) -> NDArray[np.int64]:
            """Returns int64 [G], the same number where these facts are the same."""
            return np.unique(facts[:, [at[name] for name in names]], axis=0, return_inverse=True)[1].ravel()

        alike = [numbered("set"), numbered("set", "places"), numbered("set", "tensor", "context"), numbered("set", "expert")]
        self._alike = np.array(alike)
        self._least = np.full(self._alike.shape, np.inf)  # expected over promised seconds, best of those alike
        self._count = np.zeros(self._alike.shape)
        self._cut = numbered("tensor", "context", "expert", "tables")
        uncut = (facts[:, 2:] == 1).all(axis=1)  # has its prices first
        self._new = np.where(uncut, 1.0, NEW_CUT)
        self._times, self._waits = np.ones(len(rows)), np.full(len(rows), True)

    def __iter__(self) -> Iterator[int]:
        """Yields the number of every group; after the budget in any order."""
        for _ in self.groups:
            if self._budget.left_s() <= 0.0:
                yield from np.flatnonzero(self._waits).tolist()
                return
            number = self._first()
            while not self._exact[number]:
                devices, degrees, _ = self.groups[number]
                self.promised_s[number], self._exact[number] = self._promises.step_s(devices, degrees), True
                number = self._first()
            self._waits[number], self._new[self._cut == self._cut[number]] = False, 1.0
            yield number

    def _first(self) -> int:
        """Returns the number of the group that is expected to be the quickest of those that wait."""
        return int(np.where(self._waits, self.promised_s * self._times * self._new, np.inf).argmin())

    def learn(self, number: int, best_s: float) -> None:
        """Takes in the seconds that the best of a group is expected to take; inf where none fits."""
        alike = self._alike == self._alike[:, number, None]
        self._count[alike] += 1
        self._least[alike] = np.minimum(self._least, best_s / self.promised_s[number])[alike]
        own = alike[0]
        least, count = np.where(np.isinf(self._least), UNFIT, self._least)[:, own], self._count[:, own]
        self._times[own] = 1.0 + ((least - 1.0) * count / (count + TRUST)).max(axis=0)
