"""The comparison of two plans as data and as text: each plan, and what makes the difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlplace.text import gb, ms, percent, table

MOST_ROWS = 12
"""Rows of a table of parts; the rest is summed up in one more."""

STRATEGY, PLACEMENT = "a whole strategy", "a placement of groups"


@dataclass(frozen=True)
class Side:
    """One of the plans and what its step takes.

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


def side_lines(a: Side, b: Side) -> list[str]:
    """Returns two plans as a table."""
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
    for name in dict.fromkeys([*a.peak_bytes, *b.peak_bytes]):
        peaks = a.peak_bytes.get(name), b.peak_bytes.get(name)
        rows.append([f"peak GB of {name}", gb(peaks[0]), gb(peaks[1]), _relative(*peaks)])
    return table(["", "first", "second", "change"], rows)


def _relative(here: float | None, there: float | None) -> str:
    """What the second takes more than the first."""
    if here is None or there is None or here <= 1e-12 * there:  # nothing, but for rounding
        return ""
    return percent(there / here - 1.0, sign=True) if abs(there - here) > 5e-4 * abs(here) else "same"


@dataclass(frozen=True)
class Block:
    """Groups of one module that the plans have on different devices.

    Attributes:
        module: Path of the module, see `rlplace.simulator.path.module_of`.
        source: Device in the first plan.
        destination: Device in the second.
        groups: Their names.
        effect_s: What the first plan's step gains when this block alone moves; None when it was not simulated, or the step
            then cannot complete.
        feasible: Whether that plan fits.
    """

    module: str
    source: str
    destination: str
    groups: tuple[str, ...]
    effect_s: float | None
    feasible: bool


@dataclass(frozen=True)
class Word:
    """Something that two strategies say differently.

    Attributes:
        name: What it is about.
        first: How the first says it.
        second: How the second does.
        effect_s: What the first plan's step gains when it says this as the second does; None where it cannot.
        note: What else to know of the effect.
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
        settings: By name what two placements say differently: (first, second).
        renamed: Devices of the second placement by the name under which they are compared; empty when none had to be.
        blocks: Groups that differ, largest effect first.
        same_groups: Groups on the same device.
        words: What two strategies say differently.
        lines: Recomputation and offload, block by block where they differ.
        notes: What else to know.
    """

    first: Side
    second: Side
    settings: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    same_groups: int = 0
    words: tuple[Word, ...] = ()
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def change_s(self) -> float | None:
        """What the second plan's step takes more than the first's."""
        if self.first.step_time_s is None or self.second.step_time_s is None:
            return None
        return self.second.step_time_s - self.first.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**dataclasses.asdict(self), "change_s": self.change_s}

    def text(self) -> str:
        """For people."""
        a, b = self.first, self.second
        if a.kind == b.kind == PLACEMENT:
            lines = [*side_lines(a, b), *self._groups()]
        else:
            samples = f"{a.samples} samples" if a.samples == b.samples else f"{a.samples} and {b.samples} samples"
            compared = "two whole strategies" if a.kind == b.kind else f"{a.kind} against {b.kind}"
            lines = [f"{compared}, {samples} a step", f"first: {a.words}", f"second: {b.words}", "", *side_lines(a, b)]
        if self.words:
            rows = [[word.name, word.first, word.second, ms(word.effect_s, sign=True), word.note] for word in self.words]
            lines += ["", *table(["put alone into the first", "<first", "<second", "step ms", "<"], rows)]
        elif a.kind == b.kind == STRATEGY:
            lines += ["", "the strategies say the same"]
        return "\n".join([*lines, *self.lines, *(f"note: {note}" for note in self.notes)])

    def _groups(self) -> list[str]:
        """Returns how two placements differ."""
        lines = [f"{name}: {here} in the first, {there} in the second" for name, (here, there) in self.settings.items()]
        if self.renamed:
            pairs = ", ".join(f"{there} as {here}" for there, here in self.renamed.items())
            lines.append(f"devices of the second plan are compared under other names of their kind: {pairs}")
        count = sum(len(block.groups) for block in self.blocks)
        lines += ["", f"{self.same_groups} groups sit alike, {count} differ"]
        if self.blocks:
            rows = [
                [
                    block.module,
                    f"{block.source} -> {block.destination}",
                    str(len(block.groups)),
                    ms(block.effect_s, sign=True),
                    "" if block.feasible or block.effect_s is None else "does not fit alone",
                ]
                for block in self.blocks[:MOST_ROWS]
            ]
            lines += table(["moved alone", "<", "groups", "step ms", "<"], rows)
            if len(self.blocks) > MOST_ROWS:
                lines.append(f"{len(self.blocks) - MOST_ROWS} more blocks")
        return lines
