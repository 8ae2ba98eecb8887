"""The classical search for a strategy: uniform ones first, then local search from the best of unlike kinds.

Everything is counted against one budget of calls and seconds. With calls and without a time limit the answer is the same from
run to run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from rlplace.errors import InfeasibleError, InputError
from rlplace.records import plain
from rlplace.strategy.cuts import Balance
from rlplace.strategy.fit import fitted
from rlplace.strategy.moves import neighbours
from rlplace.strategy.tries import OutOfBudgetError, Question, Tried, Tries
from rlplace.strategy.uniform import all_options, kind_of, try_uniform

STARTS = 4
"""Kinds of strategies from whose best one local search starts."""


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        ranked: Drafts that fit, the best first.
        uniform: The best uniform one that fits; None where none was found.
        of_kinds: The best of every kind, by its name; see `kind_of`. Kinds of which nothing fits have their nearest miss.
        refused: Why one of a kind cannot run, by its name.
        calls: Evaluations.
        complete: Whether it ended by itself and was not cut by its budget.
        reasons: Why drafts were left out, with how many of each.
    """

    ranked: tuple[Tried, ...]
    uniform: Tried | None
    of_kinds: dict[str, Tried]
    refused: dict[str, str]
    calls: int
    complete: bool
    reasons: dict[str, int]


def search(question: Question, *, calls: int | None = None, time_limit_s: float | None = None) -> Answer:
    """The best strategies that fit.

    Args:
        question: What is asked.
        calls: Evaluations at most.
        time_limit_s: Seconds at most.

    Raises:
        InputError: The space, or what can run, leaves no strategy; says which key to relax.
        InfeasibleError: None fits.
    """
    tries = Tries(question, calls=calls, time_limit_s=time_limit_s)
    complete, uniform = True, None
    try:
        try_uniform(tries)
        uniform = tries.best
        balance = Balance(question.costs, question.cluster)
        for start in list(starts(tries)):
            climb(tries, start, balance)
    except OutOfBudgetError:
        complete = False
    known = tries.known()
    ranked = tuple(tried for tried in known if tried.fits)
    if not ranked:
        raise _nothing(tries)
    uniform = uniform or tries.best  # where the budget ended among them
    of_kinds = {kind_of(tried.draft): tried for tried in reversed(known) if math.isfinite(tried.step_s)}
    refused = {kind_of(tried.draft): tried.reason for tried in known if tried.reason}
    uniform = uniform if uniform is not None and uniform.fits else None
    return Answer(ranked, uniform, of_kinds, refused, tries.calls, complete, tries.reasons)


def climb(tries: Tries, start: Tried, balance: Balance) -> Tried:
    """Moves to better neighbours until there is none.

    Raises:
        OutOfBudgetError: The budget ended before.
    """
    while True:
        better = next(_better(tries, start, balance), None)
        if better is None:
            return start
        start = better


def _better(tries: Tries, start: Tried, balance: Balance) -> Iterator[Tried]:
    """Neighbours that are quicker and fit."""
    seen = tries.question.scores.evaluate(start.draft)
    for draft in neighbours(start.draft, seen, balance):
        if draft.batch != tries.question.batch:
            continue
        tried = tries.score(draft)
        if tried.step_s < start.step_s:
            whole = tried if tried.fits else fitted(tries, draft)
            if whole is not None and whole.step_s < start.step_s * (1 - 1e-9):
                yield whole


def starts(tries: Tries) -> Iterator[Tried]:
    """The best drafts that fit of a few unlike kinds, the best first."""
    kinds: set[str] = set()
    for tried in tries.known():
        kind = kind_of(tried.draft)
        if tried.fits and kind not in kinds and len(kinds) < STARTS:
            kinds.add(kind)
            yield tried


def _any_uniform(question: Question) -> bool:
    """Whether the space leaves a uniform strategy."""
    balance = Balance(question.costs, question.cluster)
    return any(question.space.forbids(option.draft(balance)) is None for option in all_options(question, balance))


def _nothing(tries: Tries) -> Exception:
    """Why no strategy can be the answer."""
    question, best = tries.question, tries.best
    if best is not None and best.over_bytes > 0:
        short = int(best.over_bytes)
        return InfeasibleError(
            f"no strategy fits: the nearest ({kind_of(best.draft)}) is {short / 1e9:.2f} GB over the devices' memory; use more "
            "or larger devices, a smaller batch, or a wider space",
            short_bytes=short,
        )
    if tries.reasons:
        reason = max(tries.reasons, key=lambda text: tries.reasons[text])
        key = reason.removeprefix("space: ")
        return InputError(
            f"space: it leaves no strategy; relax {key} first" if key != reason else f"no strategy can run: {reason}"
        )
    words = [f"space: it leaves no strategy for a batch of {question.batch}"]
    for key, values in plain(question.space).items():
        if _any_uniform(dataclasses.replace(question, space=msgspec.structs.replace(question.space, **{key: None}))):
            words.append(f"; relax {key}={','.join(map(str, values))} first")
            break
    else:
        words.append(f"; relax {question.space.text()}")
    near = (question.batch + way * distance for distance in range(1, question.batch + 1) for way in (1, -1))
    batch = next((n for n in near if n > 0 and _any_uniform(dataclasses.replace(question, batch=n))), None)
    return InputError("".join(words) + ("" if batch is None else f", or use a batch of {batch}"))
