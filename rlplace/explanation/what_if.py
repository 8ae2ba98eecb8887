"""What other hardware or a larger batch would bring: the same plan there, and the best that a search finds.

Every question is asked twice, because a plan made for four devices does not use a fifth. What is found for one question is
tried for all, so no answer is worse than what is known already, and the luck of a search is not taken for the worth of a
change. What a change is worth is therefore its re-planned step against the re-planned step as things are, by the sample where
the numbers of samples differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlplace.text import ms, percent, table

CALLS = 256
"""Simulations of each search beside the classical floor."""

AS_IS = "as it is"

Candidate = TypeVar("Candidate", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Question(Generic[Candidate]):
    """A change, the plan with it, and how other plans are found and tried there.

    Attributes:
        change: In words.
        samples: Samples of a step.
        same: The same plan.
        same_s: Its step time; None when it cannot complete.
        same_feasible: Whether it fits.
        step_s: Step time of a plan that was found for any question; inf when it does not fit here.
        search: Finds plans, given those that are known; None: nothing is planned anew.
    """

    change: str
    samples: int
    same: Candidate
    same_s: float | None
    same_feasible: bool
    step_s: Callable[[Candidate], float]
    search: Callable[[Sequence[Candidate]], Iterable[Candidate]] | None


@dataclass(frozen=True)
class WhatIf:
    """One change.

    Attributes:
        change: In words.
        same_s: Step time of the same plan; None when it cannot complete.
        same_feasible: Whether that fits.
        samples: Samples of a step.
        replanned_s: Step time of the best plan that was found, never above a feasible `same_s`; None when the search found
            nothing that fits, or was not made.
    """

    change: str
    same_s: float | None
    same_feasible: bool
    samples: int
    replanned_s: float | None

    @property
    def sample_s(self) -> float | None:
        """Seconds a sample of the best that is known; None when nothing fits."""
        step = self.replanned_s if self.replanned_s is not None else self.same_s if self.same_feasible else None
        return None if step is None else step / max(self.samples, 1)


def answers(asked: Iterable[Question[Candidate]]) -> tuple[WhatIf, ...]:
    """Answers the questions, the unchanged plan first."""
    asked = list(asked)
    known = dict.fromkeys(question.same for question in asked)
    for question in asked:
        if question.search is not None:
            known |= dict.fromkeys(question.search(list(known)))
    results = []
    for question in asked:
        steps = [question.same_s] if question.same_feasible and question.same_s is not None else []
        best_s = min([*steps, *map(question.step_s, known)], default=math.inf) if question.search is not None else math.inf
        replanned_s = best_s if math.isfinite(best_s) else None
        results.append(WhatIf(question.change, question.same_s, question.same_feasible, question.samples, replanned_s))
    return tuple(results)


def what_if_lines(results: Sequence[WhatIf]) -> list[str]:
    """Returns the answers as a table."""
    base = next(entry for entry in results if entry.change == AS_IS)
    rows = []
    for entry in results:
        gain = "-"
        if entry.sample_s is not None and base.sample_s:
            gain = percent(base.sample_s / entry.sample_s - 1.0, sign=True) if entry.sample_s > 0 else "-"
        fits = ms(entry.same_s) if entry.same_feasible else "does not fit"
        rows.append([entry.change, fits, ms(entry.replanned_s), str(entry.samples), gain if entry is not base else ""])
    lines = table(["what if", "same plan ms", "planned anew ms", "samples", "samples/s"], rows)
    if any(entry.replanned_s is not None for entry in results):
        lines.append("planned anew: the quickest plan known, of the same one and of searches, over all questions")
    return lines
