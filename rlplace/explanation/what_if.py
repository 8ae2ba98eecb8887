"""The gain of other hardware or a larger batch: the same plan there, and the best that a search finds.

Every change is evaluated twice, because a plan made for four devices does not use a fifth. A plan found under one change is
tried under all, so that no answer is worse than a plan already known, and the luck of a search is not taken for the worth of a
change. The worth of a change is therefore its re-planned step against the re-planned step as things are, by the sample where
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
class Variant(Generic[Candidate]):
    """A change, the plan under it, and how other plans are found and evaluated there.

    Attributes:
        change: In words.
        samples: Samples of a step.
        same: The unchanged plan.
        same_s: Its step time; None when it cannot complete.
        same_feasible: Whether it fits.
        step_s: Step time of a plan that was found under any change; inf when it does not fit here.
        search: Finds plans, starting from those that are known; None: nothing is planned anew.
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
        same_s: Step time of the unchanged plan; None when it cannot complete.
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
        """Seconds a sample of the best plan known; None when nothing fits."""
        step = self.replanned_s if self.replanned_s is not None else self.same_s if self.same_feasible else None
        return None if step is None else step / max(self.samples, 1)


def evaluate_variants(variants: Sequence[Variant[Candidate]]) -> tuple[WhatIf, ...]:
    """Searches under every change, then evaluates every plan found under all of them; the unchanged hardware comes first."""
    known = dict.fromkeys(variant.same for variant in variants)
    for variant in variants:
        if variant.search is not None:
            known |= dict.fromkeys(variant.search(list(known)))
    results = []
    for variant in variants:
        steps = [variant.same_s] if variant.same_feasible and variant.same_s is not None else []
        best_s = min([*steps, *map(variant.step_s, known)], default=math.inf) if variant.search is not None else math.inf
        replanned_s = best_s if math.isfinite(best_s) else None
        results.append(WhatIf(variant.change, variant.same_s, variant.same_feasible, variant.samples, replanned_s))
    return tuple(results)


def what_if_lines(results: Sequence[WhatIf]) -> list[str]:
    """Returns the answers as a table."""
    base = next(entry for entry in results if entry.change == AS_IS)
    rows = []
    for entry in results:
        gain = "" if entry is base else "-"
        if entry is not base and entry.sample_s and base.sample_s:
            gain = percent(base.sample_s / entry.sample_s - 1.0, sign=True)
        fits = ms(entry.same_s) if entry.same_feasible else "does not fit"
        rows.append([entry.change, fits, ms(entry.replanned_s), str(entry.samples), gain])
    lines = table(["what if", "same plan ms", "planned anew ms", "samples", "samples/s"], rows)
    if any(entry.replanned_s is not None for entry in results):
        lines.append("planned anew: the quickest plan known, of the unchanged one and of searches under all changes")
    return lines
