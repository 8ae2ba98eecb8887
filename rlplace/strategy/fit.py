"""Making a draft fit: the least recomputation and offload that memory asks for.

Every place takes as many of its steps (`rlplace.strategy.savings`) as it needs and no more. Memory falls with the steps, so
their number is found by bisection, of all places at once. `repaired` then betters what a few blocks choose.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from rlplace.strategy.costs import RECOMPUTE
from rlplace.strategy.drafts import OFFLOAD, Draft
from rlplace.strategy.savings import Choice, estimates, in_flight, steps
from rlplace.strategy.tries import Tried, Tries

EXCHANGES = 100
"""Pairs of blocks that exchange what they give up, of those that an estimate finds worth trying."""


def fitted(tries: Tries, draft: Draft, below_s: float = math.inf) -> Tried | None:
    """The draft with the fewest steps that fit on every place; None where none fits.

    Args:
        tries: Evaluates.
        draft: What it recomputes and offloads already is not looked at.
        below_s: Of interest is only what is quicker: where the draft is not, though it keeps everything, there is no search.
    """
    choices = _choices(tries)
    if not choices:
        return None
    first = _all(draft, choices[0])
    tried = tries.score(first)
    if tried.fits or not tried.over_bytes:
        return tried if tried.fits else None
    if tried.step_s >= below_s:
        return None
    choices = _runnable(tries, draft, choices)
    ladders = [steps(tries.question, draft, place, choices) for place in range(len(draft.places))]
    over = _over(tries, first)
    low, high = [0] * len(ladders), [len(ladder) if over[place] else 0 for place, ladder in enumerate(ladders)]
    last = tries.score(_at(first, ladders, high))
    if not last.fits:
        return None
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        over = _over(tries, _at(first, ladders, middle))
        for place, (a, b) in enumerate(zip(low, high, strict=True)):
            if a < b:
                low[place], high[place] = (middle[place] + 1, b) if over[place] else (a, middle[place])
    tried = tries.score(_at(first, ladders, high))
    return tried if tried.fits else last


def other_choices(tries: Tries, draft: Draft) -> Iterator[Draft]:
    """The draft with another choice for one block, or for two of a place, of which one gives up less; the best promise first.

    Blocks that are alike and choose alike are as good as one.
    """
    choices = _runnable(tries, draft, _choices(tries))
    classes, passes = tries.question.costs.classes, in_flight(draft)
    now = list(zip(draft.recompute, draft.offload, strict=True))
    stage_of = draft.stage_of_block
    for place in range(len(draft.places)):
        own = draft.blocks_of(place)
        if not any(now[block] != choices[0] for block in own):
            continue
        seconds, held = estimates(tries.question, draft, place, choices)
        groups = {(int(classes[block]), stage_of[block], now[block]): block for block in reversed(own)}
        changes = []  # (seconds, bytes, block, choice)
        for block in groups.values():
            total = held[0, :, block] + passes[stage_of[block]] * held[1, :, block]
            at = choices.index(now[block]) if now[block] in choices else 0
            changes += [
                (seconds[c, block] - seconds[at, block], total[c] - total[at], block, choices[c])
                for c in range(len(choices))
                if c != at
            ]
        for _, _, block, choice in sorted(changes):
            yield _changed(draft, {block: choice})
        pairs = []
        for less, more in itertools.product([c for c in changes if c[0] < 0.0], [c for c in changes if c[1] < 0.0]):
            if less[2] != more[2]:
                pairs.append((less[0] + more[0], less[2], more[2], less[3], more[3]))
        for _, one, other, first, second in sorted(pairs)[:EXCHANGES]:
            yield _changed(draft, {one: first, other: second})


def _choices(tries: Tries) -> list[Choice]:
    """What the space allows a block to choose."""
    space = tries.question.space
    recompute = [number for number, word in enumerate(RECOMPUTE) if space.allows("recompute", word)]
    offload = [number for number, word in enumerate(OFFLOAD) if space.allows("offload", word)]
    return list(itertools.product(recompute, offload))


def _runnable(tries: Tries, draft: Draft, choices: list[Choice]) -> list[Choice]:
    """Choices without those that the engine refuses for all blocks of the draft."""
    first = choices[0]
    alone = [choice for choice in choices[1:] if choice[0] == first[0] or choice[1] == first[1]]
    refused = [choice for choice in alone if tries.refused(_all(draft, choice))]
    return [
        choice
        for choice in choices
        if not any(bad in (choice, (choice[0], first[1]), (first[0], choice[1])) for bad in refused)
    ]


def _all(draft: Draft, choice: Choice) -> Draft:
    """The draft with one choice for all blocks."""
    blocks = draft.bounds[-1]
    return dataclasses.replace(draft, recompute=bytes([choice[0]]) * blocks, offload=bytes([choice[1]]) * blocks)


def _changed(draft: Draft, chosen: dict[int, Choice]) -> Draft:
    """The draft with other choices for some blocks."""
    recompute, offload = bytearray(draft.recompute), bytearray(draft.offload)
    for block, choice in chosen.items():
        recompute[block], offload[block] = choice
    return dataclasses.replace(draft, recompute=bytes(recompute), offload=bytes(offload))


def _at(first: Draft, ladders: list[list[tuple[int, Choice]]], taken: list[int]) -> Draft:
    """The draft after so many steps of every place."""
    return _changed(first, {block: choice for ladder, n in zip(ladders, taken, strict=True) for block, choice in ladder[:n]})


def _over(tries: Tries, draft: Draft) -> np.ndarray:
    """Which places have a device over capacity."""
    tries.score(draft)
    peaks = tries.question.scores.evaluate(draft).peak_memory_bytes
    capacity = [device.memory_bytes for device in tries.question.cluster.devices]
    return np.array(
        [
            any(memory is not None and peaks[device] > memory for device in place.devices for memory in (capacity[device],))
            for place in draft.places
        ]
    )
