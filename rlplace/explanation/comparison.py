"""The answers of a plan that is explained (`ExplainedStep`): what other hardware would bring, and a plan beside another.

The gain of other hardware or a larger batch: the same plan there, and the best that a search finds. Every change is evaluated
twice, because a plan made for four devices does not use a fifth. A plan found under one change is tried under all, so that no
answer is worse than a plan already known, and the luck of a search is not taken for the worth of a change. The worth of a
change is therefore its re-planned step against the re-planned step as things are, by the sample where the numbers of samples
differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlplace.text import by_run, gb, ms, percent, table

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


MOST_ROWS = 12
"""Rows of a table of parts; the rest is summed up in one more."""

STRATEGY, PLACEMENT = "a whole strategy", "a placement of groups"


@dataclass(frozen=True)
class Side:
    """One of the plans and the cost of its step.

    Attributes:
        kind: `STRATEGY` or `PLACEMENT`.
        planner: Name of its planner.
        words: The plan in one line.
        samples: Samples of a step.
        step_time_s: None when the step cannot complete, or a strategy does not fit.
        feasible: It completes and fits.
        peak_bytes: By name of device.
        parts: Seconds by activity: for a strategy those of its busiest stage, for a placement summed over devices and
            over transfers; None where the step cannot complete.
        path: Seconds of a placement's critical path by cause.
    """

    kind: str
    planner: str
    words: str
    samples: int
    step_time_s: float | None
    feasible: bool
    peak_bytes: Mapping[str, int]
    parts: Mapping[str, float | None]
    path: Mapping[str, float] = dataclasses.field(default_factory=dict)


class StepBoundary(Protocol):
    """The bounds of a step as text."""

    def lines(self) -> list[str]:
        """Returns them for people."""


class ExplainedStep(Protocol):
    """The step of a plan: `PlacementStep`, simulated on its problem, or `StrategyStep`, priced block by block."""

    def bounds(self) -> StepBoundary:
        """Returns the bounds of the step, which completes."""

    def what_if(self, *, calls: int, time_limit_s: float | None, seed: int) -> tuple[WhatIf, ...]:
        """Returns the plan on its own hardware, then one change at a time.

        Args:
            calls: Simulations of each search, beside the classical floor of placements; 0: nothing is planned anew.
            time_limit_s: Seconds of each search.
            seed: Seed of the searches.
        """

    def side(self) -> Side:
        """Returns the plan as one side of a comparison."""


@dataclass(frozen=True)
class MovedBlock:
    """Groups of one module that the plans have on different devices.

    Attributes:
        module: Path of the module, see `rlplace.simulator.path.module_of`.
        source: Device in the first plan.
        destination: Device in the second.
        groups: Their names.
        effect_s: Change of the first plan's step when this block alone moves; None when it was not simulated, or the step then
            cannot complete.
        feasible: Whether that plan fits.
    """

    module: str
    source: str
    destination: str
    groups: tuple[str, ...]
    effect_s: float | None
    feasible: bool


@dataclass(frozen=True)
class ChangedWord:
    """A choice in which two strategies differ.

    Attributes:
        name: The choice.
        first: Its value in the first strategy.
        second: Its value in the second.
        effect_s: Change of the first plan's step when this choice alone is the second's; None where it cannot be.
        note: A remark on the effect.
    """

    name: str
    first: str
    second: str
    effect_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """Two plans side by side.

    Attributes:
        first, second: The plans.
        settings: By name the settings in which two placements differ: (first, second).
        renamed: Devices of the second placement by the name under which they are compared; empty when none had to be.
        blocks: Groups that differ, largest effect first.
        same_groups: Groups on the same device.
        words: Choices in which two strategies differ.
        lines: Recomputation and offload, block by block where they differ.
        notes: Further remarks.
    """

    first: Side
    second: Side
    settings: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    blocks: tuple[MovedBlock, ...] = ()
    same_groups: int = 0
    words: tuple[ChangedWord, ...] = ()
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def change_s(self) -> float | None:
        """Step time of the second plan minus that of the first."""
        if self.first.step_time_s is None or self.second.step_time_s is None:
            return None
        return self.second.step_time_s - self.first.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {**dataclasses.asdict(self), "change_s": self.change_s}

    def text(self) -> str:
        """Returns the comparison for people."""
        a, b = self.first, self.second
        if a.kind == b.kind == PLACEMENT:
            lines = [*self._sides(), *self._groups()]
        else:
            samples = f"{a.samples} samples" if a.samples == b.samples else f"{a.samples} and {b.samples} samples"
            compared = "two whole strategies" if a.kind == b.kind else f"{a.kind} against {b.kind}"
            lines = [f"{compared}, {samples} a step", f"first: {a.words}", f"second: {b.words}", "", *self._sides()]
        if self.words:
            rows = [[word.name, word.first, word.second, ms(word.effect_s, sign=True), word.note] for word in self.words]
            lines += ["", *table(["put alone into the first", "<first", "<second", "step ms", "<"], rows)]
        elif a.kind == b.kind == STRATEGY:
            lines += ["", "the strategies say the same"]
        return "\n".join([*lines, *self.lines, *(f"note: {note}" for note in self.notes)])

    def _sides(self) -> list[str]:
        """Returns the steps of both plans as a table."""
        a, b = self.first, self.second
        steps = a.step_time_s, b.step_time_s
        rows = [
            ["planner", a.planner, b.planner, ""],
            ["step ms", ms(steps[0]), ms(steps[1]), _relative(*steps) if a.samples == b.samples else "other samples"],
            ["samples/s", *(f"{side.samples / side.step_time_s:.2f}" if side.step_time_s else "-" for side in (a, b)), ""],
            ["feasible", *("yes" if side.feasible else "no" for side in (a, b)), ""],
        ]
        for prefix, here, there in (("", a.parts, b.parts), ("path, ", a.path, b.path)):
            for name in dict.fromkeys([*here, *there]):
                pair = here.get(name), there.get(name)
                if any(pair):
                    rows.append([f"{prefix}{name} ms", ms(pair[0]), ms(pair[1]), _relative(*pair)])
        peaks_of = {name: (a.peak_bytes.get(name), b.peak_bytes.get(name)) for name in [*a.peak_bytes, *b.peak_bytes]}
        by_device = by_run([[name, gb(x), gb(y), _relative(x, y)] for name, (x, y) in peaks_of.items()])
        rows += [[f"peak GB of {name}", *cells] for name, *cells in by_device]
        return table(["", "first", "second", "change"], rows)

    def _groups(self) -> list[str]:
        """Returns the differences of two placements."""
        lines = [f"{name}: {here} in the first, {there} in the second" for name, (here, there) in self.settings.items()]
        if self.renamed:
            pairs = ", ".join(f"{there} as {here}" for there, here in self.renamed.items())
            lines.append(f"devices of the second plan are compared under other names of their kind: {pairs}")
        count = sum(len(block.groups) for block in self.blocks)
        lines += ["", f"{self.same_groups} groups sit alike, {count} differ"]
        rows = []
        for block in self.blocks[:MOST_ROWS]:
            path, note = f"{block.source} -> {block.destination}", "" if block.feasible else "does not fit alone"
            effect = ms(block.effect_s, sign=True)
            rows.append([block.module, path, str(len(block.groups)), effect, "" if block.effect_s is None else note])
        lines += table(["moved alone", "<", "groups", "step ms", "<"], rows) if rows else []
        more = len(self.blocks) - MOST_ROWS
        return [*lines, f"{more} more blocks"] if more > 0 else lines


def _relative(here: float | None, there: float | None) -> str:
    """Returns the second value relative to the first."""
    if here is None or there is None or here <= 1e-12 * there:  # nothing, but for rounding
        return ""
    return percent(there / here - 1.0, sign=True) if abs(there - here) > 5e-4 * abs(here) else "same"
