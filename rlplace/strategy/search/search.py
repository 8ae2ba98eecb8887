"""The classical search for a strategy: uniform ones, then stages by dynamic programming, then local search from the best.

Everything is counted against one budget of calls and seconds. With calls and without a time limit the result is the same from
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
from rlplace.files import frozen_heap
from rlplace.plan.prediction import too_large
from rlplace.records import plain
from rlplace.strategy.costs import Cut
from rlplace.strategy.drafts import Draft, kind_of
from rlplace.strategy.search.by_kind import starts_by_kind
from rlplace.strategy.search.fit import fitted, tuned
from rlplace.strategy.search.listing import listed, try_rivals, try_uniform
from rlplace.strategy.search.moves import Moves
from rlplace.strategy.search.published import published_starts
from rlplace.strategy.search.shapes import divisors
from rlplace.strategy.search.stages import try_stages
from rlplace.strategy.search.tries import OutOfBudgetError, Progress, SearchProblem, Tried, Tries
from rlplace.strategy.search.uniform import UniformOptions
from rlplace.strategy.search.unlike import try_unlike

STARTS = 4
"""Kinds of strategies from whose best one local search starts."""

UNIFORM_PART = 0.45
"""Spent part of the budget after which the search goes on from uniform strategies."""

FIRST_UNIFORM = 6
"""Uniform strategies that come before everything else, the most promising ones."""

BY_KIND_PART = 0.08
"""Part of the budget for starts with a shape for each kind of device."""

TABLES_PART = 0.1
"""Part of the budget for tables of stages and for published planners."""

PATIENCE = 3
"""Uniform strategies end earlier where none was better in so many times the calls up to the best."""

LEAST_UNIFORM = 64
"""Calls before which they do not."""

LISTING_PART = 0.3
"""Part of the seconds after which no further uniform strategies are listed before the search."""

RIVALS_PART = 0.6
"""Spent part of the seconds after which no further rivals are evaluated, where something fits."""

BEAM = 8
"""Drafts from which local search goes on."""

TURN = 16
"""Neighbours of a draft before another's turn: the best draft takes turns with all starts."""

SLACK = 1.1
"""Neighbours that take so many times as long may lead on."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

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


@frozen_heap()
def search(
    problem: SearchProblem, *, calls: int | None = None, time_limit_s: float | None = None, progress: Progress | None = None
) -> SearchResult:
    """Returns the best strategies that fit.

    Args:
        problem: The problem.
        calls: Evaluations at most.
        time_limit_s: Seconds at most.
        progress: Called as the search proceeds.

    Raises:
        InputError: The space, or the engine, leaves no strategy; names the key to relax.
        InfeasibleError: None fits.
    """
    tries = Tries(problem, calls=calls, time_limit_s=time_limit_s, progress=progress)
    options = listed(problem, LISTING_PART * tries.budget.seconds)
    others, complete, all_kinds = try_uniform(tries, options.first), True, False
    uniform: list[Tried | None] = []
    try:
        uniform.extend(itertools.islice(others, FIRST_UNIFORM))
        for tried in try_rivals(tries, options.rivals):
            uniform.append(tried)
            if tries.fitting() and tries.late(RIVALS_PART):
                break
        else:
            all_kinds = options.complete
        best_s, until = math.inf, 0
        for tried in others:
            uniform.append(tried)
            if tries.best_s < best_s:
                best_s, until = tries.best_s, max(PATIENCE * tries.calls, LEAST_UNIFORM)
            if tries.fitting() and (tries.spent() > UNIFORM_PART or tries.calls > until):
                break
        try_unlike(tries, _explore)
        first: list[Tried | None] = []
        until_part = tries.spent() + BY_KIND_PART
        for draft in starts_by_kind(problem, BY_KIND_PART / 2 * tries.budget.seconds):
            first.append(fitted(tries, draft, SLACK * tries.best_s))
            if tries.spent() > until_part:
                break
        published = (fitted(tries, draft, 1.2 * tries.best_s) for draft in published_starts(problem))
        until_part = tries.spent() + TABLES_PART
        for tried in itertools.chain(try_stages(tries, tries.spent() + TABLES_PART / 2), published):
            first.append(tried)
            if tries.spent() > until_part:
                break
        chains = sorted(filter(None, first), key=lambda tried: tried.step_s)
        improve(tries, [*starts(tries), *chains[:STARTS]])
        improve(tries, list(starts(tries)), thorough=True)
        uniform.extend(others)
        for some in options.rest():
            if tries.spent() >= 1.0:
                raise OutOfBudgetError
            uniform.extend(try_uniform(tries, some))
    except OutOfBudgetError:
        complete = False
    known = tries.known()
    of_kinds: dict[str, Tried] = {}
    for tried in known:
        if kind_of(tried.draft) not in of_kinds and tries.runs(tried):
            of_kinds[kind_of(tried.draft)] = tried
    ranked = tuple(tried for tried in known if tried.fits and tries.runs(tried, ask=False))
    if not ranked:
        raise _nothing(tries, bool(options.first or options.rivals), complete)
    refused = {kind_of(tried.draft): tried.reason for tried in known if tried.reason}
    by_time = sorted(filter(None, uniform), key=lambda tried: tried.step_s)
    best = next(filter(tries.runs, by_time), None)
    return SearchResult(ranked, best, of_kinds, refused, all_kinds, tries.calls, complete, tries.reasons)


def _explore(tries: Tries) -> None:
    """Tries uniform strategies, and better ones near them; raises as `improve` does."""
    for _ in try_uniform(tries, listed(tries.problem, LISTING_PART * tries.budget.seconds, in_time=True).first):
        pass
    improve(tries, list(starts(tries)))


def improve(tries: Tries, starts: list[Tried], *, thorough: bool = False) -> None:
    """Moves from the best draft and every start in turn to better neighbours, until no start and none of the best few has any.

    Drafts that differ in cuts, recomputation and offload alone count as one, represented by their best. The thorough search
    tries more choices of blocks, which costs calls: it follows the other one.

    Raises:
        OutOfBudgetError: The budget ended before.
    """
    moves = Moves(tries.problem)
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
    """Puts a draft into the beam if it is the best of those that it represents."""
    draft = tried.draft
    key = draft.places, draft.place_of_stage, draft.schedule, draft.microbatch, draft.microbatches
    if key in beam and beam[key].step_s <= tried.step_s * (1 + 1e-12):
        return False
    beam[key] = tried
    return True


def _neighbours(tries: Tries, at: Tried, moves: Moves, thorough: bool) -> Iterator[Tried | None]:
    """Yields neighbours, with choices of blocks fitted anew or onward; None for those that do not fit or are much slower."""
    yield tuned(tries, at, (1, 2) if thorough else (1,), ends=1 + thorough)
    for draft in moves.neighbours(at.draft, tries.problem.scores.evaluate(at.draft)):
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
    kinds: dict[str, Tried] = {}
    for tried in tries.known():
        if tried.fits and not tried.draft.beside and kind_of(tried.draft) not in kinds and tries.runs(tried):
            kinds[kind_of(tried.draft)] = tried
    yield from itertools.islice(kinds.values(), STARTS)


def _any_uniform(problem: SearchProblem) -> bool:
    """Returns whether the space leaves a uniform strategy."""
    return any(problem.space.forbids(option.draft(problem.balance)) is None for option in UniformOptions(problem).every())


def _nothing(tries: Tries, any_uniform: bool, complete: bool) -> Exception:
    """Explains why there is no strategy.

    Args:
        tries: All of them.
        any_uniform: Whether the space leaves a uniform strategy.
        complete: Whether the budget did not cut the search.
    """
    problem, best = tries.problem, tries.best
    if best is not None and best.over_bytes > 0:
        short = int(best.over_bytes)
        hosts = ", hosts with more memory" if problem.cluster.host_memory_bytes else ""
        return InfeasibleError(
            f"no strategy fits: the nearest ({kind_of(best.draft)}) is {too_large(short, len(best.draft.devices))}; "
            + ("use" if complete else f"only {tries.calls} were evaluated: allow more calls or time, or use")
            + f" more or larger devices{hosts}, a smaller batch, or a wider space",
            short_bytes=short,
        )
    if tries.reasons and any_uniform:
        reasons = [text for text, _ in tries.reasons.most_common()]
        key, other = reasons[0].removeprefix("space: "), next((text for text in reasons if not text.startswith("space: ")), "")
        if key == reasons[0]:
            return InputError(f"no strategy can run: {key}")
        why = f". Of what it leaves: {other}" if other else ""
        return InputError(f"space: it leaves no strategy; relax {key} first{why}")
    unpriced = [problem.costs.why_not(Cut(samples)) for samples in divisors(problem.batch)]
    if None not in unpriced:
        return InputError(f"no strategy for a batch of {problem.batch}: {unpriced[-1]}")
    relax = problem.space.text()
    for key, values in plain(problem.space).items():
        if _any_uniform(dataclasses.replace(problem, space=msgspec.structs.replace(problem.space, **{key: None}))):
            relax = f"{key}={','.join(map(str, values))} first"
            break
    if relax.startswith("tensor="):
        samples = next(size for size, reason in zip(divisors(problem.batch), unpriced, strict=True) if reason is None)
        uncut = (problem.costs.why_not(Cut(samples, degree)) for degree in plain(problem.space)["tensor"])
        relax += next((f" ({reason.removeprefix('tensor_layouts: ')})" for reason in uncut if reason is not None), "")
    near = (problem.batch + way * distance for distance in range(1, problem.batch + 1) for way in (1, -1))
    batch = next((n for n in near if n > 0 and _any_uniform(dataclasses.replace(problem, batch=n))), None)
    instead = "" if batch is None else f", or use a batch of {batch}"
    return InputError(f"space: it leaves no strategy for a batch of {problem.batch}; relax {relax}{instead}")
