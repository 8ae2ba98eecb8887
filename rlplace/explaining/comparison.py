"""The record of two plans side by side, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlplace.text import gb, ms, percent, table

MOST_ROWS = 12
"""Rows of a table of parts; the rest is summed up in one more."""


@dataclass(frozen=True)
class Side:
    """One of the plans.

    Attributes:
        planner: Who made it.
        step_time_s: None when the step cannot complete.
        samples: Samples of a step.
        feasible: It completes and fits.
        peak_bytes: Per device.
        compute_s, transfer_s: Summed over devices, and over transfers.
        idle_s: Summed over devices, None when the step cannot complete.
        path: Seconds of the critical path by cause.
        settings: Micro-batches, schedule and the like.
    """

    planner: str
    step_time_s: float | None
    samples: int
    feasible: bool
    peak_bytes: tuple[int, ...]
    compute_s: float
    transfer_s: float
    idle_s: float | None
    path: Mapping[str, float]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """Groups of one module that the plans have on different devices.

    Attributes:
        module: See `rlplace.explaining.stretches.module_of`.
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
class Difference:
    """Two plans side by side.

    Attributes:
        devices: Names of the devices, those of the first plan's problem.
        first, second: The plans.
        settings: By name what the plans say differently: (first, second).
        renamed: Devices of the second plan by the name under which they are compared; empty when none had to be.
        blocks: Groups that differ, largest effect first.
        same_groups: Groups on the same device.
        notes: What else to know.
    """

    devices: tuple[str, ...]
    first: Side
    second: Side
    settings: Mapping[str, tuple[Any, Any]]
    renamed: Mapping[str, str]
    blocks: tuple[Block, ...]
    same_groups: int
    notes: tuple[str, ...]

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
        rows = [
            ["planner", a.planner, b.planner, ""],
            ["step ms", ms(a.step_time_s), ms(b.step_time_s), relative(a.step_time_s, b.step_time_s)],
            ["samples/s", rate_text(a.samples, a.step_time_s), rate_text(b.samples, b.step_time_s), ""],
            ["feasible", _yes(a.feasible), _yes(b.feasible), ""],
            ["computing ms", ms(a.compute_s), ms(b.compute_s), relative(a.compute_s, b.compute_s)],
            ["moving ms", ms(a.transfer_s), ms(b.transfer_s), relative(a.transfer_s, b.transfer_s)],
            ["idle ms", ms(a.idle_s), ms(b.idle_s), relative(a.idle_s, b.idle_s)],
        ]
        for cause in dict.fromkeys([*a.path, *b.path]):
            here, there = a.path.get(cause, 0.0), b.path.get(cause, 0.0)
            rows.append([f"path, {cause} ms", ms(here), ms(there), relative(here, there)])
        for name, here, there in zip(self.devices, a.peak_bytes, b.peak_bytes, strict=False):
            rows.append([f"peak GB of {name}", gb(here), gb(there), relative(here, there)])
        lines = table(["", "first", "second", "change"], rows)
        lines += [f"{name}: {here} in the first, {there} in the second" for name, (here, there) in self.settings.items()]
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
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def relative(here: float | None, there: float | None) -> str:
    """What the second takes more than the first, for a table."""
    if here is None or there is None or here == 0:
        return ""
    return percent(there / here - 1.0, sign=True) if abs(there - here) > 5e-4 * abs(here) else "same"


def rate_text(samples: int, step_time_s: float | None) -> str:
    """Samples a second, for a table."""
    return f"{samples / step_time_s:.2f}" if step_time_s else "-"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
