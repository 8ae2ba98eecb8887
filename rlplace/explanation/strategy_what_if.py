"""What other hardware or a larger batch would bring a whole strategy."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlplace.cluster.parse import Cluster, parse
from rlplace.errors import InfeasibleError, InputError
from rlplace.explanation import what_if
from rlplace.explanation.changes import larger, quicker_links
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem

if TYPE_CHECKING:
    from rlplace.planned import Planned

_PRESET = re.compile(r"(\s*[\w.-]+\s*:\s*)(\d+)((?:x\d+)?(?:,[^+]*)?)")


def strategy_what_if(
    planned: Planned, *, calls: int = what_if.CALLS, time_limit_s: float | None = None
) -> tuple[what_if.WhatIf, ...]:
    """Returns the strategy on its own hardware, then one change at a time.

    Args:
        planned: A plan with a strategy.
        calls: Evaluations of each search; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
    """
    draft, questions = planned.draft(), []
    for change, question in _questions(planned.search_problem):
        more = question.batch // draft.batch  # a larger batch is more micro-batches
        same = dataclasses.replace(draft, microbatches=tuple(more * count for count in draft.microbatches))
        step_s = _step_s(question, same)
        fits = math.isfinite(step_s)
        anew = partial(_search, question, calls, time_limit_s) if calls else None
        same_s = step_s if fits else None
        questions.append(what_if.Question(change, question.batch, same, same_s, fits, partial(_step_s, question), anew))
    return what_if.answers(questions)


def _questions(question: SearchProblem) -> Iterator[tuple[str, SearchProblem]]:
    """Yields all changes, the unchanged hardware first."""
    yield what_if.AS_IS, question
    machine = question.cluster
    if any(device.memory_bytes is not None for device in machine.devices):
        devices = tuple(larger(device, 2.0) for device in machine.devices)
        yield "double the memory", _on(question, dataclasses.replace(machine, devices=devices))
    if machine.num_devices > 1:
        yield "all links twice as fast", _on(question, dataclasses.replace(machine, links=quicker_links(machine.links, 2.0)))
    known = _PRESET.fullmatch(machine.text or "")
    if known is not None:
        text = f"{known[1]}{2 * int(known[2])}{known[3]}"
        yield f"twice the devices ({text})", _on(question, parse(text))
    yield "twice the batch", dataclasses.replace(question, batch=2 * question.batch)


def _on(question: SearchProblem, machine: Cluster) -> SearchProblem:
    """Returns the question on another cluster with devices of the same kinds."""
    return dataclasses.replace(question, scores=DraftEvaluator(question.costs, machine))


def _step_s(question: SearchProblem, draft: Draft) -> float:
    """Returns step time; inf for what does not fit, or answers another question."""
    if draft.batch != question.batch or max(draft.devices) >= question.cluster.num_devices:
        return math.inf
    try:
        step_s, over = question.scores.score(draft)
    except InputError:  # the schedule cannot run that number of micro-batches
        return math.inf
    return math.inf if over else step_s


def _search(question: SearchProblem, calls: int, time_limit_s: float | None, known: Sequence[Draft]) -> list[Draft]:
    """Returns the best strategy that a search finds; it has its own starts, so known strategies do not matter."""
    try:
        return [search(question, calls=calls, time_limit_s=time_limit_s).ranked[0].draft]
    except (InputError, InfeasibleError):  # nothing can be chosen there, or nothing fits
        return []
