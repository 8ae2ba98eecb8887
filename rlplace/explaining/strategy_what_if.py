"""What other hardware or a larger batch would bring a whole strategy: the same one there, and the best that a search finds.

Every question is asked twice, because a strategy for four devices does not use a fifth. What is found for one question is
evaluated for all that it can answer, so that the luck of a search is not taken for the worth of a change.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlplace.cluster.parse import Cluster, parse
from rlplace.errors import InfeasibleError, InputError
from rlplace.explaining.changes import larger, quicker_links
from rlplace.explaining.questions import AS_IS
from rlplace.explaining.what_if import CALLS, WhatIf
from rlplace.strategy.drafts import Draft
from rlplace.strategy.evaluate import Evaluator
from rlplace.strategy.search import search
from rlplace.strategy.tries import Question

if TYPE_CHECKING:
    from rlplace.evaluating.again import Asked

_PRESET = re.compile(r"(\s*[\w.-]+\s*:\s*)(\d+)((?:x\d+)?(?:,[^+]*)?)")


def strategy_what_if(asked: Asked, *, calls: int = CALLS, time_limit_s: float | None = None) -> tuple[WhatIf, ...]:
    """The strategy and its hardware as they are, then one change at a time.

    Args:
        asked: A plan and its question.
        calls: Evaluations of each search; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
    """
    changed = [(change, question, _same(asked.draft(), question)) for change, question in _questions(asked.question)]
    pool = dict.fromkeys(draft for _, _, draft in changed if draft is not None)
    if calls:
        for _, question, _ in changed:
            try:
                found = search(question, calls=calls, time_limit_s=time_limit_s)
            except (InputError, InfeasibleError):  # nothing can be chosen there, or nothing fits
                continue
            pool[found.ranked[0].draft] = None
    answers = []
    for change, question, draft in changed:
        same_s = math.inf if draft is None else _step_s(question, draft)
        best_s = min((_step_s(question, other) for other in pool), default=math.inf) if calls else math.inf
        answers.append(WhatIf(change, _finite(same_s), math.isfinite(same_s), question.batch, _finite(best_s)))
    return tuple(answers)


def _questions(question: Question) -> Iterator[tuple[str, Question]]:
    """All changes, things as they are first."""
    yield AS_IS, question
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


def _on(question: Question, machine: Cluster) -> Question:
    """The question on another cluster with devices of the same kinds."""
    return dataclasses.replace(question, scores=Evaluator(question.costs, machine))


def _same(draft: Draft, question: Question) -> Draft | None:
    """The plan's draft for a batch that is a multiple of its own: more micro-batches."""
    times, rest = divmod(question.batch, draft.batch)
    return None if rest else dataclasses.replace(draft, microbatches=tuple(times * count for count in draft.microbatches))


def _step_s(question: Question, draft: Draft) -> float:
    """Step time; inf for what does not fit, or answers another question."""
    if draft.batch != question.batch or max(draft.devices) >= question.cluster.num_devices:
        return math.inf
    try:
        step_s, over = question.scores.score(draft)
    except InputError:  # the schedule cannot run so many micro-batches
        return math.inf
    return math.inf if over else step_s


def _finite(step_s: float) -> float | None:
    return step_s if math.isfinite(step_s) else None
