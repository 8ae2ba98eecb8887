"""Making a draft fit: the least recomputation, then the least offload, that memory asks for.

Recomputation costs a tenth to a third of a step, optimizer state in host memory half of it and more, so every place takes as
many steps of a ladder as it needs and no more: blocks go from keeping everything to `selective`, then to `full`, then to
`optimizer` offload, then to offload of everything. Memory falls with every step of the ladder, so the number of steps is found
by bisection, of all places at once.
"""

from __future__ import annotations

import dataclasses
import math

from rlplace.strategy.costs import RECOMPUTE
from rlplace.strategy.drafts import Draft
from rlplace.strategy.space import OFFLOAD_WORDS, Space
from rlplace.strategy.tries import Tried, Tries


def fitted(tries: Tries, draft: Draft, below_s: float = math.inf) -> Tried | None:
    """The draft with the fewest steps of the ladder that fit on every place; None where none fits.

    Args:
        tries: Evaluates.
        draft: What it recomputes and offloads already is not looked at.
        below_s: Of interest is only what is quicker: where the draft is not, though it keeps everything, there is no search.
    """
    rungs = _rungs(tries.question.space)
    if not rungs:
        return None
    blocks = _blocks_of_places(draft)
    low = [0] * len(blocks)
    first = _at(draft, blocks, rungs, low)
    tried = tries.score(first)
    if tried.fits or not tried.over_bytes:
        return tried if tried.fits else None
    if tried.step_s >= below_s:
        return None
    # Rungs that the engine refuses for this draft are no part of its ladder.
    whole = [len(own) for own in blocks]
    rungs = [rungs[0], *(rung for rung in rungs[1:] if not tries.refused(_at(draft, blocks, [rungs[0], rung], whole)))]
    high = [len(own) * (len(rungs) - 1) for own in blocks]
    last = tries.score(_at(draft, blocks, rungs, high))
    if not last.fits:
        return None
    over = _over(tries, first)
    high = [most if over[place] else 0 for place, most in enumerate(high)]
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        over = _over(tries, _at(draft, blocks, rungs, middle))
        for place, (a, b) in enumerate(zip(low, high, strict=True)):
            if a < b:
                low[place], high[place] = (middle[place] + 1, b) if over[place] else (a, middle[place])
    tried = tries.score(_at(draft, blocks, rungs, high))
    return tried if tried.fits else last


def _rungs(space: Space) -> list[tuple[int, int]]:
    """Steps of the ladder as (recompute, offload), the cheapest first."""
    recompute = [number for number, word in enumerate(RECOMPUTE) if space.allows("recompute", word)]
    offload = [number for number, word in enumerate(OFFLOAD_WORDS) if space.allows("offload", word)]
    if not recompute or not offload:
        return []
    return [(number, offload[0]) for number in recompute] + [(recompute[-1], number) for number in offload[1:]]


def _blocks_of_places(draft: Draft) -> list[list[int]]:
    """Blocks of every place, in model order."""
    blocks: list[list[int]] = [[] for _ in draft.places]
    for stage, place in enumerate(draft.place_of_stage):
        blocks[place] += range(draft.bounds[stage], draft.bounds[stage + 1])
    return blocks


def _at(draft: Draft, blocks: list[list[int]], rungs: list[tuple[int, int]], steps: list[int]) -> Draft:
    """The draft with so many steps taken on every place, each block one rung after the other."""
    recompute, offload = bytearray(draft.bounds[-1]), bytearray(draft.bounds[-1])
    for own, taken in zip(blocks, steps, strict=True):
        whole, rest = divmod(taken, len(own))
        for index, block in enumerate(own):
            recompute[block], offload[block] = rungs[whole + (index < rest)]
    return dataclasses.replace(draft, recompute=bytes(recompute), offload=bytes(offload))


def _over(tries: Tries, draft: Draft) -> list[bool]:
    """Which places have a device over capacity."""
    tries.score(draft)
    peaks = tries.question.scores.evaluate(draft).peak_memory_bytes
    capacity = [device.memory_bytes for device in tries.question.cluster.devices]
    return [
        any(memory is not None and peaks[device] > memory for device in place.devices for memory in (capacity[device],))
        for place in draft.places
    ]
