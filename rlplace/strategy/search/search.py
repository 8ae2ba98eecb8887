"""The classical search for a strategy: uniform ones, then stages by dynamic programming, then local search from the best.

Everything is counted against one budget of calls and seconds. With calls and without a time limit the answer is the same from
run to run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from rlplace.errors import InfeasibleError, InputError
from rlplace.plan.prediction import too_large
from rlplace.records import plain
from rlplace.strategy.costs import Cut
from rlplace.strategy.drafts import Draft, kind_of
from rlplace.strategy.search.cuts import Balance
from rlplace.strategy.search.fit import fitted, tuned
from rlplace.strategy.search.moves import Moves
from rlplace.strategy.search.published import published_starts
from rlplace.strategy.search.shapes import divisors
from rlplace.strategy.search.stages import try_stages
from rlplace.strategy.search.tries import OutOfBudgetError, Progress, SearchProblem, Tried, Tries
from rlplace.strategy.search.uniform import Option, Options, by_sets, try_rivals, try_uniform
from rlplace.strategy.search.unlike import try_unlike

STARTS = 4
"""Kinds of strategies from whose best one local search starts."""

UNIFORM_PART = 0.4
"""Of the budget, for uniform strategies before the search goes on from them."""

TABLES_PART = 0.15
"""Of the budget, for tables of stages."""

FIRST_STAGES = 6
"""Drafts of these tables that come before uniform strategies."""

CHAINS_PART = 0.5
"""Of the budget, when no other draft of the tables or of published planners is tried."""

PATIENCE = 3
"""Uniform strategies end earlier where none was better in so many times the calls up to the best."""

LEAST_PART = 0.6
"""Of the seconds, what is left at least when all options are priced and the rivals are evaluated."""

BEAM = 8
"""Drafts from which local search goes on."""

TURN = 16
"""Neighbours of a draft before it is another's turn: the best draft takes turns with all starts."""

SLACK = 1.1
"""Neighbours that take so many times as long may lead on."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        ranked: Drafts that fit, the best first.
        uniform: The best uniform one that fits; None where none was found.
        of_kinds: The best of every kind, by its name; see `kind_of`. Kinds of which nothing fits have their nearest miss.
        refused: Why one of a kind cannot run, by its name.
        all_kinds: Whether drafts of every kind were tried of which there are any.
        calls: Evaluations.
        complete: Whether it ended by itself and was not cut by its budget.
        reasons: Why drafts were left out, with how many of each.
    """

    ranked: tuple[Tried, ...]
    uniform: Tried | None
    of_kinds: dict[str, Tried]
    refused: dict[str, str]
    all_kinds: bool
    calls: int
    complete: bool
    reasons: dict[str, int]


def search(
    question: SearchProblem, *, calls: int | None = None, time_limit_s: float | None = None, progress: Progress | None = None
) -> SearchResult:
    """Returns the best strategies that fit.

    Args:
        question: What is asked.
        calls: Evaluations at most.
        time_limit_s: Seconds at most.
        progress: Told how far it is.

    Raises:
        InputError: The space, or what can run, leaves no strategy; says which key to relax.
        InfeasibleError: None fits.
    """
    tries = Tries(question, calls=calls, time_limit_s=time_limit_s, progress=progress)
    tries.timed = False
    balance = Balance(question.costs, question.cluster)
    options, rivals, rest = by_sets(question, balance)
    others, complete, all_kinds = try_uniform(tries, options, balance), True, False
    uniform: list[Tried | None] = []
    try:
        uniform.extend(try_rivals(tries, rivals, balance))
        all_kinds = True
        tries.end_by_time(LEAST_PART)
        stages = try_stages(tries, tries.spent() + TABLES_PART)
        first = list(itertools.islice(stages, FIRST_STAGES))
        best_s, until = math.inf, 0
        for tried in others:
            uniform.append(tried)
            if tries.best_s < best_s:
                best_s, until = tries.best_s, PATIENCE * tries.calls
            if tries.fitting() and (tries.spent() > UNIFORM_PART or tries.calls > until):
                break
        published = (fitted(tries, draft, 1.2 * tries.best_s) for draft in published_starts(question))
        for tried in itertools.chain(stages, published):
            first.append(tried)
            if tries.spent() > CHAINS_PART:
                break
        chains = [tried for tried in first if tried is not None]
        try_unlike(tries, _explore)
        known = list(starts(tries))
        known += sorted(chains, key=lambda tried: tried.step_s)[:STARTS]
        improve(tries, known, balance)
        improve(tries, list(starts(tries)), balance, thorough=True)
        uniform.extend(itertools.chain(others, try_uniform(tries, rest(), balance)))
    except OutOfBudgetError:
        complete = False
    known = tries.known()
    ranked = tuple(tried for tried in known if tried.fits)
    if not ranked:
        raise _nothing(tries, bool(options or rivals), complete)
    of_kinds = {kind_of(tried.draft): tried for tried in reversed(known) if math.isfinite(tried.step_s)}
    refused = {kind_of(tried.draft): tried.reason for tried in known if tried.reason}
    best = min((tried for tried in uniform if tried is not None), key=lambda tried: tried.step_s, default=None)
    return SearchResult(ranked, best, of_kinds, refused, all_kinds, tries.calls, complete, tries.reasons)


def _explore(tries: Tries) -> None:
    """Uniform strategies, and what is better near them; raises as `improve` does."""
    balance = Balance(tries.question.costs, tries.question.cluster)
    options = sorted(Options(tries.question, balance).every(), key=Option.key)
    for _ in try_uniform(tries, options, balance):
        pass
    improve(tries, list(starts(tries)), balance)


def improve(tries: Tries, starts: list[Tried], balance: Balance, *, thorough: bool = False) -> None:
    """Goes on from the best draft and every start in turn to better neighbours, until the best few and all starts have none.

    Drafts that differ in cuts, recomputation and offload alone count as one: the best of them stands for all. The thorough
    search tries more of what blocks choose, which costs calls: it is for when the other has ended.

    Raises:
        OutOfBudgetError: The budget ended before.
    """
    moves = Moves(tries.question, balance)
    beam: dict[object, Tried] = {}
    open_: dict[Draft, Iterator[Tried | None]] = {}
    done: set[Draft] = set()
    for start in starts:
        _enter(beam, start)
    for turn in itertools.count():
        front = sorted(beam.values(), key=lambda tried: tried.step_s)[:BEAM]
        going, behind = ([tried for tried in some if tried.draft not in done] for some in (front, starts))
        if not going and not behind:
            return
        at = behind[turn // 2 % len(behind)] if behind and (turn % 2 or not going) else going[0]
        if at.draft not in open_:
            open_[at.draft] = itertools.chain(_neighbours(tries, at, moves, thorough), map(done.add, (at.draft,)))
        for found in itertools.islice(open_[at.draft], TURN):
            if found is None:
                continue
            worst_s = front[-1].step_s if len(front) == BEAM else math.inf
            entered = found.step_s < worst_s and _enter(beam, found)
            if at in starts and found.step_s < at.step_s:
                starts[starts.index(at)] = found
                break
            if entered:
                break


def _enter(beam: dict[object, Tried], tried: Tried) -> bool:
    """Puts a draft into the beam if it is the best of those that it stands for."""
    draft = tried.draft
    key = draft.places, draft.place_of_stage, draft.schedule, draft.microbatch, draft.microbatches
    if key in beam and beam[key].step_s <= tried.step_s * (1 + 1e-12):
        return False
    beam[key] = tried
    return True


def _neighbours(tries: Tries, at: Tried, moves: Moves, thorough: bool) -> Iterator[Tried | None]:
    """Yields neighbours, None for those that do not fit or are much slower; with what blocks choose fitted anew, or onward."""
    yield tuned(tries, at, (1, 2) if thorough else (1,), ends=1 + thorough)
    for draft in moves.neighbours(at.draft, tries.question.scores.evaluate(at.draft)):
        found = fitted(tries, draft, at.step_s * SLACK, thorough=thorough)
        if thorough and found is not None and any(found.draft.recompute + found.draft.offload):
            as_now = dataclasses.replace(draft, recompute=at.draft.recompute, offload=at.draft.offload)
            onward = fitted(tries, as_now, at.step_s * SLACK, thorough=True, onward=True)
            found = min(found, onward or found, key=lambda tried: tried.key)
        yield found if found is not None and found.step_s < at.step_s * SLACK else None
    if thorough:
        yield tuned(tries, at, (3,))


def starts(tries: Tries) -> Iterator[Tried]:
    """Yields the best drafts of one pipeline that fit, of a few unlike kinds, the best first."""
    kinds: set[str] = set()
    for tried in tries.known():
        kind = kind_of(tried.draft)
        if tried.fits and not tried.draft.beside and kind not in kinds and len(kinds) < STARTS:
            kinds.add(kind)
            yield tried


def _any_uniform(question: SearchProblem) -> bool:
    """Returns whether the space leaves a uniform strategy."""
    balance = Balance(question.costs, question.cluster)
    return any(question.space.forbids(option.draft(balance)) is None for option in Options(question, balance).every())


def _nothing(tries: Tries, any_uniform: bool, complete: bool) -> Exception:
    """Explains why no strategy can be the answer; `any_uniform`: whether the space leaves a uniform one; `complete`: it was not
    cut.
    """
    question, best = tries.question, tries.best
    if best is not None and best.over_bytes > 0:
        short = int(best.over_bytes)
        return InfeasibleError(
            f"no strategy fits: the nearest ({kind_of(best.draft)}) is {too_large(short, len(best.draft.devices))}; "
            + ("use" if complete else f"only {tries.calls} were evaluated: allow more calls or time, or use")
            + " more or larger devices, a smaller batch, or a wider space",
            short_bytes=short,
        )
    if tries.reasons and any_uniform:
        reasons = sorted(tries.reasons, key=lambda text: -tries.reasons[text])
        key, other = reasons[0].removeprefix("space: "), next((text for text in reasons if not text.startswith("space: ")), "")
        if key == reasons[0]:
            return InputError(f"no strategy can run: {key}")
        why = f". Of what it leaves: {other}" if other else ""
        return InputError(f"space: it leaves no strategy; relax {key} first{why}")
    unpriced = [question.costs.why_not(Cut(samples)) for samples in divisors(question.batch)]
    if None not in unpriced:
        return InputError(f"no strategy for a batch of {question.batch}: {unpriced[-1]}")
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
