"""Drafts that fit: the least recomputation and offload that memory asks for.

A *choice* for a block is a pair (recompute, offload). Of a block's choices only those on the lower convex hull of seconds over
bytes are worth taking; walked from the quickest on, each is a *step*, and the steps of all blocks of a place in the order of
their seconds per byte saved are the greedy answer to its knapsack. Every place takes as many steps as it needs and no more.
Memory falls with the steps: an estimate of what they save chooses the next number to try, then bisection, of all places at
once. `tuned` then improves the choices of a few blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.schedule import SCHEDULES
from rlplace.strategy.costs import RECOMPUTE, Floats
from rlplace.strategy.drafts import OFFLOAD, Draft
from rlplace.strategy.search.tries import SearchProblem, Tried, Tries

Choice = tuple[int, int]
"""Indices of `rlplace.strategy.costs.RECOMPUTE` and `rlplace.strategy.drafts.OFFLOAD`."""

GUESSES = 4
"""Numbers of steps that are tried by the estimate before bisection goes on."""

EXCHANGES = 100
"""Pairs, and triples, of blocks that exchange choices, of those that an estimate finds worth trying."""

REPAIRS, NEAR = 4, 1.1
"""Single changes that improve a draft which takes at most so many times as long as the best."""

MOST_CHANGES = 48
"""Changes of blocks of a place that are combined to exchanges: the half that is quickest, and the half that saves most."""


class Step(NamedTuple):
    """A block saves memory; sorted by `price`, the seconds for each of the bytes saved."""

    price: float
    block: int
    choice: Choice
    saved_bytes: float


def fitted(
    tries: Tries, draft: Draft, below_s: float = math.inf, *, thorough: bool = False, onward: bool = False
) -> Tried | None:
    """Returns the draft with the fewest steps that fit on every place; None where none fits.

    Args:
        tries: Evaluates.
        draft: The start.
        below_s: The search ends where the draft is not quicker, though it does not fit yet.
        thorough: Whether what fits is improved where it is nearly as quick as the best.
        onward: Whether steps go on from what the draft recomputes and offloads; else that is ignored.
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
    runnable = _runnable(tries, draft, choices)
    every = [steps(tries.problem, draft, place, runnable) for place in range(len(draft.places))]
    saved_by = [np.cumsum([0.0, *(step.saved_bytes for step in own)]) for own in every]  # by the first 0, 1, ... steps
    low, high = [0] * len(every), [len(saved) for saved in saved_by]  # enough at least; known to be enough
    at = low[:]
    for guess in itertools.count():
        missing = (-tries.problem.scores.left_bytes(tried.draft)).tolist()
        if tried.step_s >= below_s and all(short > 0.0 or not n for short, n in zip(missing, at, strict=True)):
            return None
        for place, (short, saved) in enumerate(zip(missing, saved_by, strict=True)):
            n = at[place]
            low[place], high[place] = (n + 1, high[place]) if short > 0.0 else (low[place], n)
            if low[place] == len(saved):
                return None
            middle = int(np.searchsorted(saved, saved[n] + short)) if guess < GUESSES else (low[place] + high[place]) // 2
            at[place] = min(max(middle, low[place]), max(high[place] - 1, low[place]))
        taken = (step for some, n in zip(every, at, strict=True) for step in some[:n])
        tried = tries.score(changed(draft, {step.block: step.choice for step in taken}))
        if low == high:
            break
    if not tried.fits:
        return None
    return _repaired(tries, tried) if thorough else tried


def _repaired(tries: Tries, tried: Tried) -> Tried:
    """Improves what fits block by block if it is nearly as quick as the best: the last step may save more than is missing."""
    while tries.best is not None and tried.step_s < NEAR * tries.best.step_s:
        better = tuned(tries, tried, (1,), most=REPAIRS)
        if better is tried:
            break
        tried = better
    return tried


def tuned(tries: Tries, tried: Tried, together: Sequence[int], *, ends: int = 2, most: int | None = None) -> Tried:
    """Returns the draft after one walk over `other_choices`, the first `most`, each on top of the improvements before it."""
    for chosen in itertools.islice(other_choices(tries, tried.draft, together, ends), most):
        other = tries.score(changed(tried.draft, chosen))
        if other.fits and other.step_s < tried.step_s:
            tried = other
    return tried


def other_choices(tries: Tries, draft: Draft, together: Sequence[int], ends: int = 2) -> Iterator[dict[int, Choice]]:
    """Yields other choices for so many blocks of a place together, the most promising and the bottleneck's place first.

    Of blocks that are alike and choose alike the first and, for two `ends`, the last are tried: memory may peak at either.
    """
    choices = _runnable(tries, draft, _choices(tries))
    classes, passes = tries.problem.costs.classes, in_flight_of(draft)
    now = list(zip(draft.recompute, draft.offload, strict=True))
    stage_of = draft.stage_of_block
    left, worst = tries.problem.scores.left_bytes(draft), draft.place_of_stage[tries.problem.scores.evaluate(draft).bottleneck]
    for place in sorted(range(len(draft.places)), key=lambda place: place != worst):
        own = draft.blocks_of(place)
        if all(now[block] == choices[0] for block in own):
            continue
        seconds, held = estimates(tries.problem, draft, place, choices)
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
        room = float(left[place])
        for count in together:
            for chosen in _exchanges([change[:3] for change in changes], count, room):
                yield {changes[index][2]: changes[index][3] for index in chosen}


def _exchanges(changes: list[tuple[float, float, int]], count: int, room: float) -> Iterator[list[int]]:
    """Yields sets of changes of unlike blocks: single ones, or some that save seconds and bytes, the quickest first.

    Sets without enough room, by the estimate, come last.
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
    """Returns the choices that the space allows."""
    words = {"recompute": RECOMPUTE, "offload": OFFLOAD}
    allowed = ([n for n, word in enumerate(all_) if tries.problem.space.allows(key, word)] for key, all_ in words.items())
    return [(recompute, offload) for recompute, offload in itertools.product(*allowed)]


def _runnable(tries: Tries, draft: Draft, choices: list[Choice]) -> list[Choice]:
    """Returns choices without those that the engine refuses for all blocks of the draft."""
    first = choices[0]
    alone = [choice for choice in choices[1:] if choice[0] == first[0] or choice[1] == first[1]]
    refused = {choice for choice in alone if tries.choice_refused(_all(draft, choice))}
    return [one for one in choices if refused.isdisjoint((one, (one[0], first[1]), (first[0], one[1])))]


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


def steps(problem: SearchProblem, draft: Draft, place: int, choices: Sequence[Choice]) -> list[Step]:
    """Returns the steps of a place, the cheapest for what it saves first; blocks start at their choices in the draft."""
    seconds, held = estimates(problem, draft, place, choices)
    passes, stage_of = in_flight_of(draft), draft.stage_of_block
    hulls: dict[tuple[bytes, int, Choice], list[tuple[float, int, float]]] = {}
    found = []
    for block in draft.blocks_of(place):
        now = draft.recompute[block], draft.offload[block]
        key = seconds[:, block].tobytes() + held[:, :, block].tobytes(), passes[stage_of[block]], now
        if key not in hulls:
            start = choices.index(now) if now in choices else 0
            hulls[key] = _hull(seconds[:, block], held[0, :, block] + key[1] * held[1, :, block], start)
        found += [Step(price, block, choices[choice], saved) for price, choice, saved in hulls[key]]
    return sorted(found)


def _hull(seconds: Floats, held: Floats, here: int) -> list[tuple[float, int, float]]:
    """Returns seconds per byte, choice and bytes saved of every corner of the lower hull, after the choice `here`."""
    corners: list[tuple[float, int, float]] = []
    while True:
        saved = held[here] - held
        worth = np.flatnonzero(saved > 0.0)
        if not len(worth):
            return corners
        price = np.maximum(seconds[worth] - seconds[here], 0.0) / saved[worth]
        best = worth[np.lexsort((-saved[worth], price))[0]]
        corners.append((float(price.min()), int(best), float(saved[best])))
        here = best


def in_flight(schedule: str | None, stages: int, places: int, count: int) -> list[int]:
    """Returns about how many of so many micro-batches every stage holds at once."""
    if stages == 1:
        return [1]
    return SCHEDULES[str(schedule)].in_flight(stages, places, count)


def in_flight_of(draft: Draft) -> list[int]:
    """Returns `in_flight` of a draft."""
    return in_flight(draft.schedule, draft.stages, len(draft.places), max(draft.microbatches))


def estimates(problem: SearchProblem, draft: Draft, place: int, choices: Sequence[Choice]) -> tuple[Floats, Floats]:
    """Estimates seconds a step, and bytes, of every choice for every block of the model on a place.

    Returns:
        float64 [C, B] seconds beside those that all choices take, and float64 [2, C, B] bytes held all step long, and for each
        micro-batch in flight.
    """
    here, count = draft.places[place], max(draft.microbatches)
    samples = max(draft.microbatch) * (draft.data_degree // here.data_degree)
    x = problem.scores.packer.all_blocks(here, samples, draft.stages, count, choices)
    passes = count * (2 if draft.stages > 1 and SCHEDULES[str(draft.schedule)].splits_backward else 1)
    gathers, reduces = (np.array(times)[x.keeping.astype(np.int64)] for times in ((0, 1, 1, 2 * count), (1, 1, count, count)))
    exchanged_s = gathers * x.gather_s + reduces * (x.reduce_s + x.copies_s)
    seconds = passes * (x.again_s + x.weight_tensor_s) + x.update_s + exchanged_s
    return seconds, np.stack([x.static_bytes, x.kept_bytes])
