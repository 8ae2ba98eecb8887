"""Unlike pipelines for unlike devices: every kind of device runs the best pipeline of its own, for its share of the batch.

Shares are first in proportion to the seconds that one sample computes, then to what the pipelines found take, and in the end
micro-batches go from the slowest pipeline to others while that is quicker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rlplace.strategy.costs import Cut
from rlplace.strategy.drafts import Draft, Mesh, joined, kind_of, plain_draft
from rlplace.strategy.search.cuts import Balance
from rlplace.strategy.search.shapes import MOST_KINDS, proportional
from rlplace.strategy.search.tries import OutOfBudgetError, SearchProblem, Tried, Tries

KEPT = 3
"""Of the pipelines found for a kind of device, the best of so many kinds are tried beside those of the other devices."""

ROUNDS = 2
"""How often shares are balanced anew."""

FAR = 1.1
"""Unlike pipelines that take so many times as long as the best strategy are not balanced anew."""

PART = 0.12
"""Of the budget that is left, for the search for a pipeline of one kind of device."""


def try_unlike(tries: Tries, search: Callable[[Tries], None]) -> None:
    """Evaluates unlike pipelines side by side, one for each kind of device; nothing on like devices.

    Args:
        tries: Evaluates.
        search: Looks for strategies of one pipeline.

    Raises:
        OutOfBudgetError: The budget ended before all were looked at.
    """
    question = tries.question
    groups = _groups(question)
    if not 1 < len(groups) <= min(MOST_KINDS, question.batch) or _refused(question, groups):
        return
    weights = _speeds(question, groups)
    for _ in range(ROUNDS):
        shares = proportional(weights, question.batch)
        if shares is None:
            return
        found = [_best(tries, devices, share, search) for devices, share in zip(groups, shares, strict=True)]
        if not all(found):
            return
        together = [tries.score(joined(tried.draft for tried in chosen)) for chosen in itertools.product(*found)]
        if min(tried.step_s for tried in together) > FAR * tries.best_s:
            return
        weights = np.array([share / best[0].step_s for share, best in zip(shares, found, strict=True)])
    best = next(tried for tried in tries.known() if tried.draft.beside)
    while True:
        better = (tries.score(draft) for draft in other_shares(best.draft))
        found_better = next((tried for tried in better if tried.fits and tried.step_s < best.step_s), None)
        if found_better is None:
            return
        best = found_better


def other_shares(draft: Draft) -> Iterator[Draft]:
    """Yields micro-batches move from one pipeline to another, as few as leave both whole."""
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


def _groups(question: SearchProblem) -> list[tuple[int, ...]]:
    """Returns devices of every kind."""
    kinds = question.cluster.kinds
    names = dict.fromkeys(kind.name for kind in kinds)
    return [tuple(device for device, kind in enumerate(kinds) if kind.name == name) for name in names]


def _refused(question: SearchProblem, groups: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether the engine refuses several pipelines, be they of one device each."""
    alone = (plain_draft((0, len(question.costs.names)), [Mesh(devices[:1])]) for devices in groups)
    return question.why_not is not None and question.why_not(joined(alone)) is not None


def _speeds(question: SearchProblem, groups: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Samples a second that groups of devices compute, up to a factor."""
    balance = Balance(question.costs, question.cluster)
    size = next((size for size in range(1, question.batch + 1) if balance.can_cut(Cut(size))), 1)
    seconds = [balance.pass_s(balance.kinds(devices, 1)[0], Cut(size)).sum() for devices in groups]
    return np.array([len(devices) / own_s for devices, own_s in zip(groups, seconds, strict=True)])


def _best(tries: Tries, devices: tuple[int, ...], share: int, search: Callable[[Tries], None]) -> list[Tried]:
    """Returns the best pipelines of some devices for their share of the batch that fit; counted against the same budget."""
    own = tries.within(dataclasses.replace(tries.question, batch=share, devices=devices), PART)
    with contextlib.suppress(OutOfBudgetError):
        search(own)
    tries.budget.used += own.calls
    kinds = {kind_of(tried.draft): tried for tried in reversed(own.known()) if tried.fits}
    return sorted(kinds.values(), key=lambda tried: tried.step_s)[:KEPT]
