"""Unlike pipelines for unlike devices: every kind of device runs the best pipeline of its own, for its share of the batch.

Shares are first in proportion to the compute of each kind, then to the pipelines found; in the end micro-batches move from the
slowest pipeline to others while that is quicker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from rlplace.strategy.costs import Cut
from rlplace.strategy.drafts import Draft, Mesh, joined, kind_of, plain_draft
from rlplace.strategy.search.shapes import MOST_KINDS, devices_by_kind, proportional
from rlplace.strategy.search.tries import OutOfBudgetError, SearchProblem, Tried, Tries

KEPT = 3
"""Pipelines of a kind of device, of unlike kinds of strategies, that are combined with those of the other devices."""

ROUNDS = 2
"""Times that shares are balanced."""

EQUAL = 64
"""Least number of equal parts of the batch of which shares are made, so that each can be divided again."""

PART = 0.4
"""Part of the remaining budget for the search for pipelines of one kind of device."""


def try_unlike(tries: Tries, search: Callable[[Tries], None]) -> None:
    """Evaluates unlike pipelines side by side, one for each kind of device; nothing on like devices.

    Args:
        tries: Evaluates.
        search: Tries strategies of one pipeline.

    Raises:
        OutOfBudgetError: The budget ended before.
    """
    problem = tries.problem
    groups = list(devices_by_kind(problem).values())
    if not 1 < len(groups) <= min(MOST_KINDS, problem.batch):
        return
    alone = joined(plain_draft((0, len(problem.costs.names)), [Mesh(devices[:1])]) for devices in groups)
    if problem.why_not is not None and problem.why_not(alone) is not None:
        return
    balance = problem.balance
    cut = Cut(next((size for size in range(1, problem.batch + 1) if balance.can_cut(Cut(size))), 1))
    weights = np.array([len(own) / balance.pass_s(balance.kinds(own, 1)[0], cut).sum() for own in groups])
    part = math.gcd(problem.batch, 1 << max(0, (problem.batch // EQUAL).bit_length() - 1))
    each = PART / (ROUNDS * len(groups))
    for _ in range(ROUNDS):
        shares = proportional(weights, problem.batch // part)
        if shares is None:
            return
        found = [_best(tries, devices, share * part, search, each) for devices, share in zip(groups, shares, strict=True)]
        if not all(found):
            return
        for chosen in itertools.product(*found):
            tries.score(joined(tried.draft for tried in chosen))
        weights = np.array([share * part / best[0].step_s for share, best in zip(shares, found, strict=True)])
        if problem.batch / weights.sum() > tries.best_s:  # even were they balanced, and sums of gradients free
            return
    best: Tried | None = next(tried for tried in tries.known() if tried.draft.beside)
    while best is not None:
        now = best
        better = (tries.score(draft) for draft in other_shares(now.draft))
        best = next((tried for tried in better if tried.fits and tried.step_s < now.step_s), None)


def other_shares(draft: Draft) -> Iterator[Draft]:
    """Yields drafts in which micro-batches move from one pipeline to another, as few as leave both whole."""
    pipelines = draft.pipelines
    for one, other in itertools.permutations(range(len(pipelines)), 2):
        sizes = [pipelines[number].batch // min(pipelines[number].microbatches) for number in (one, other)]
        together = math.lcm(*sizes)
        less, more = together // sizes[0], together // sizes[1]
        if min(pipelines[one].microbatches) > less:
            changed = {one: -less, other: more}
            yield joined(
                dataclasses.replace(pipeline, microbatches=tuple(n + changed.get(number, 0) for n in pipeline.microbatches))
                for number, pipeline in enumerate(pipelines)
            )


def _best(tries: Tries, devices: tuple[int, ...], share: int, search: Callable[[Tries], None], part: float) -> list[Tried]:
    """Returns the best pipelines of some devices for their share of the batch that fit; counted against the same budget."""
    problem: SearchProblem = dataclasses.replace(tries.problem, batch=share, devices=devices)
    own = tries.within(problem, part)
    with contextlib.suppress(OutOfBudgetError):
        search(own)
    tries.budget.used += own.calls
    kinds: dict[str, Tried] = {}
    for tried in own.known():
        if tried.fits and len(kinds) < KEPT and kind_of(tried.draft) not in kinds and own.runs(tried):
            kinds[kind_of(tried.draft)] = tried
    return list(kinds.values())
