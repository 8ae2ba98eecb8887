"""Making a draft fit: the least recomputation and offload that memory asks for.

Every place takes as many of its steps (`rlplace.strategy.search.savings`) as it needs and no more. Memory falls with the steps:
an
estimate of what they save says which number to try next, then bisection, of all places at once. `repaired` then betters what a
few blocks choose.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlplace.strategy.costs import RECOMPUTE
from rlplace.strategy.drafts import OFFLOAD, Draft
from rlplace.strategy.search.savings import Choice, estimates, in_flight_of, steps
from rlplace.strategy.search.tries import Tried, Tries

GUESSES = 4
"""Numbers of steps that are tried by the estimate before bisection goes on."""

EXCHANGES = 100
"""Pairs, and triples, of blocks that exchange what they give up, of those that an estimate finds worth trying."""

REPAIRS, NEAR = 4, 1.1
"""Single changes that every draft is bettered by which takes at most so many times as long as the best."""

MOST_CHANGES = 48
"""Of blocks of a place that are combined to exchanges: the half that is quickest, and the half that saves most."""


def fitted(
    tries: Tries, draft: Draft, below_s: float = math.inf, *, thorough: bool = False, onward: bool = False
) -> Tried | None:
    """Returns the draft with the fewest steps that fit on every place; None where none fits.

    Args:
        tries: Evaluates.
        draft: Where it starts.
        below_s: Of interest is only what is quicker: the search ends where the draft is not, though it does not fit yet.
        thorough: Whether what fits is `repaired` where it is nearly as quick as the best.
        onward: Whether steps go on from what the draft recomputes and offloads already, which is not looked at otherwise.
    """
    choices = _choices(tries)
    if not choices:
        return None
    draft = draft if onward else _all(draft, choices[0])
    tried = tries.score(draft)
    if tried.fits:
        return _repaired(tries, tried) if thorough else tried
    if not tried.over_bytes or tried.step_s >= below_s:
        return None
    ladders = Ladders(tries, draft, choices)
    low, high = [0] * len(ladders.saved), [len(saved) for saved in ladders.saved]  # enough at least; known to be enough
    at = low[:]
    for guess in itertools.count():
        missing = _missing(tries, tried.draft)
        if tried.step_s >= below_s and all(short > 0.0 or not n for short, n in zip(missing, at, strict=True)):
            return None
        for place, short in enumerate(missing):
            n, saved = at[place], ladders.saved[place]
            low[place], high[place] = (n + 1, high[place]) if short > 0.0 else (low[place], n)
            if low[place] == len(saved):
                return None
            middle = int(np.searchsorted(saved, saved[n] + short)) if guess < GUESSES else (low[place] + high[place]) // 2
            at[place] = min(max(middle, low[place]), max(high[place] - 1, low[place]))
        tried = tries.score(ladders.at(at))
        if low == high:
            break
    if not tried.fits:
        return None
    return _repaired(tries, tried) if thorough else tried


class Ladders:
    """The steps of every place of a draft.

    Attributes:
        saved: By place, bytes that its first 0, 1, ... steps save, by the estimate.
    """

    def __init__(self, tries: Tries, draft: Draft, choices: list[Choice]) -> None:
        runnable = _runnable(tries, draft, choices)
        self._first = draft
        self._steps = [steps(tries.question, draft, place, runnable) for place in range(len(draft.places))]
        self.saved = [np.cumsum([0.0, *(step.saved_bytes for step in own)]) for own in self._steps]

    def at(self, taken: Sequence[int]) -> Draft:
        """Returns the draft after so many steps of every place."""
        own = (step for some, n in zip(self._steps, taken, strict=True) for step in some[:n])
        return changed(self._first, {step.block: step.choice for step in own})


def _repaired(tries: Tries, tried: Tried) -> Tried:
    """What fits, bettered block by block if it is nearly as quick as the best: the last step may save more than is missing."""
    while tries.best is not None and tried.step_s < NEAR * tries.best.step_s:
        better = tuned(tries, tried, (1,), most=REPAIRS)
        if better is tried:
            break
        tried = better
    return tried


def tuned(tries: Tries, tried: Tried, together: Sequence[int], *, ends: int = 2, most: int | None = None) -> Tried:
    """Returns the draft after one walk over `other_choices`, the first `most` of them, each on top of those that were
    better.
    """
    for chosen in itertools.islice(other_choices(tries, tried.draft, together, ends), most):
        other = tries.score(changed(tried.draft, chosen))
        if other.fits and other.step_s < tried.step_s:
            tried = other
    return tried


def other_choices(tries: Tries, draft: Draft, together: Sequence[int], ends: int = 2) -> Iterator[dict[int, Choice]]:
    """Other choices for so many blocks of a place together; the best promise first, and the place that all others wait for.

    Of blocks that are alike and choose alike the first and, for two `ends`, the last stand for all: memory may peak at either.
    """
    choices = _runnable(tries, draft, _choices(tries))
    classes, passes = tries.question.costs.classes, in_flight_of(draft)
    now = list(zip(draft.recompute, draft.offload, strict=True))
    stage_of = draft.stage_of_block
    left, worst = _left(tries, draft), draft.place_of_stage[tries.question.scores.evaluate(draft).bottleneck]
    for place in sorted(range(len(draft.places)), key=lambda place: place != worst):
        own = draft.blocks_of(place)
        if not any(now[block] != choices[0] for block in own):
            continue
        seconds, held = estimates(tries.question, draft, place, choices)
        groups: dict[object, list[int]] = {}
        for block in own:
            groups.setdefault((int(classes[block]), stage_of[block], now[block]), []).append(block)
        changes = []  # (seconds, bytes, block, choice)
        for block in dict.fromkeys(end for group in groups.values() for end in (group[0], group[-1])[:ends]):
            total = held[0, :, block] + passes[stage_of[block]] * held[1, :, block]
            at = choices.index(now[block]) if now[block] in choices else 0
            changes += [
                (seconds[c, block] - seconds[at, block], total[c] - total[at], block, choices[c])
                for c in range(len(choices))
                if c != at
            ]
        changes.sort()
        room = min(left[device] for device in draft.places[place].devices)
        for count in together:
            for chosen in _exchanges([change[:3] for change in changes], count, room):
                yield {changes[index][2]: changes[index][3] for index in chosen}


def _exchanges(changes: list[tuple[float, float, int]], count: int, room: float) -> Iterator[list[int]]:
    """So many changes of unlike blocks: single ones, or of those of which some save seconds and some bytes the quickest.

    Those that there is not enough room for, by the estimate, come last.
    """
    if count == 1:
        yield from ([index] for index in sorted(range(len(changes)), key=lambda index: changes[index][1] > room))
        return
    some = sorted({*range(MOST_CHANGES // 2), *np.argsort([change[1] for change in changes])[: MOST_CHANGES // 2].tolist()})
    some = [index for index in some if index < len(changes)]
    seconds, held, block = np.array([changes[index] for index in some]).T
    chosen = _combinations(len(some), count)
    fit = (seconds[chosen].min(axis=1) < 0.0) & (held[chosen].min(axis=1) < 0.0)
    for one, other in itertools.combinations(range(count), 2):
        fit &= block[chosen[:, one]] != block[chosen[:, other]]
    chosen = chosen[fit]
    order = np.lexsort((seconds[chosen].sum(axis=1), held[chosen].sum(axis=1) > room))
    for row in chosen[order[:EXCHANGES]]:
        yield [some[index] for index in row]


@lru_cache
def _combinations(total: int, count: int) -> NDArray[np.int64]:
    """Returns int64 [N, count], all sets of so many numbers below `total`."""
    return np.array(list(itertools.combinations(range(total), count)), dtype=np.int64).reshape(-1, count)


def _choices(tries: Tries) -> list[Choice]:
    """What the space allows a block to choose."""
    space = tries.question.space
    recompute = [number for number, word in enumerate(RECOMPUTE) if space.allows("recompute", word)]
    offload = [number for number, word in enumerate(OFFLOAD) if space.allows("offload", word)]
    return list(itertools.product(recompute, offload))


def _runnable(tries: Tries, draft: Draft, choices: list[Choice]) -> list[Choice]:
    """Returns choices without those that the engine refuses for all blocks of the draft."""
    first = choices[0]
    alone = [choice for choice in choices[1:] if choice[0] == first[0] or choice[1] == first[1]]
    refused = [choice for choice in alone if tries.refused(_all(draft, choice))]
    return [
        choice
        for choice in choices
        if not any(bad in (choice, (choice[0], first[1]), (first[0], choice[1])) for bad in refused)
    ]


def _all(draft: Draft, choice: Choice) -> Draft:
    """Returns the draft with one choice for all blocks."""
    blocks = draft.bounds[-1]
    return dataclasses.replace(draft, recompute=bytes([choice[0]]) * blocks, offload=bytes([choice[1]]) * blocks)


def changed(draft: Draft, chosen: dict[int, Choice]) -> Draft:
    """Returns the draft with other choices for some blocks."""
    recompute, offload = bytearray(draft.recompute), bytearray(draft.offload)
    for block, choice in chosen.items():
        recompute[block], offload[block] = choice
    return dataclasses.replace(draft, recompute=bytes(recompute), offload=bytes(offload))


def _missing(tries: Tries, draft: Draft) -> list[float]:
    """Returns bytes that are missing on the fullest device of every place; below 0 where there is room."""
    left = _left(tries, draft)
    return [max(-left[device] for device in place.devices) for place in draft.places]


def _left(tries: Tries, draft: Draft) -> list[float]:
    """Returns bytes of every device that a draft leaves unused; below 0 where it is over capacity."""
    peaks = tries.question.scores.evaluate(draft).peak_memory_bytes
    return [
        math.inf if device.memory_bytes is None else device.memory_bytes - peak
        for device, peak in zip(tries.question.cluster.devices, peaks, strict=True)
    ]
