"""The ways to run a global batch, side by side, and why the first one was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.cli.common import print_table
from rlplace.text import ms

Entry = Mapping[str, Any]
"""An entry of ``predicted.strategies``; see `rlplace.planners.strategy.sweep`."""


def show_strategies(entries: Sequence[Entry]) -> None:
    """A table with the best of every kind, the quickest first, and the choice in words.

    Args:
        entries: All strategies, the chosen one first.
    """
    best = best_of_kinds(entries)
    curve = entries[0].get("epochs") is not None
    header = ["strategy", "replicas x devices", "micro-batches", "schedule", "step ms", "samples/s", "busy"]
    rows = []
    for entry in best:
        has_plan = entry["step_time_s"] is not None
        row = [
            entry["kind"],
            f"{entry['replicas']} x {entry['width']}",
            f"{entry['microbatches']} x {entry['samples']}",
            entry["schedule"] or "-",
            ms(entry["step_time_s"]),
            f"{entry['samples_per_s']:.2f}" if has_plan else "-",
            f"{100 * entry['busy']:.0f} %" if has_plan else "-",
        ]
        rows.append([*row, _epochs(entry, entries[0])] if curve else row)
    print_table([*header, "epochs, time to target"] if curve else header, rows)
    tried = sum(entry["step_time_s"] is not None for entry in entries)
    print(f"the best of each kind, with the best classical plan of each; {tried} of {len(entries)} strategies simulated\n")
    for line in explain(entries):
        print(line)
    print()


def best_of_kinds(entries: Sequence[Entry]) -> list[Entry]:
    """The first entry of every kind; entries that were simulated come first."""
    best: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda e: e["step_time_s"] is None):  # stable: the quickest stay first
        best.setdefault(entry["kind"], entry)
    return list(best.values())


def explain(entries: Sequence[Entry]) -> list[str]:
    """Why the first entry was chosen, one line a kind of strategy."""
    chosen, *others = best_of_kinds(entries)
    lines = [f"chosen: {describe(chosen)}, its devices compute {100 * chosen['busy']:.0f} % of the time"]
    for entry in others:
        if entry["cost"] is not None:
            slower = entry["cost"] / chosen["cost"]
            what = "longer to the target" if chosen.get("epochs") is not None else "longer for the same samples"
            how = "as quick" if slower < 1.0005 else f"{slower:.2f} times {what}"
            lines.append(f"  {describe(entry)}: {how}, devices compute {100 * entry['busy']:.0f} %")
        elif entry["bound_s"] is not None and str(entry["reason"]).startswith("cannot"):
            lines.append(f"  {entry['kind']}: takes {ms(entry['bound_s'])} ms at the least, cannot be quicker")
        else:
            lines.append(f"  {entry['kind']}: {str(entry['reason']).partition(';')[0]}")
    late = sum(str(entry["reason"]).startswith("not tried: the time") for entry in entries)
    if late:
        lines.append(f"  not tried for lack of time: {late} strategies; a larger --time-limit tries them")
    return lines


def describe(entry: Entry) -> str:
    """A strategy in words."""
    parts = [entry["kind"]]
    if entry["replicas"] > 1:
        parts.append(count(entry["replicas"], "replica"))
    if entry["width"] > 1:
        parts.append(f"{entry['width']} devices" + (" each" if entry["replicas"] > 1 else ""))
    if entry["microbatches"] > 1:
        parts.append(f"{entry['microbatches']} micro-batches")
    return ", ".join(parts)


def _epochs(entry: Entry, chosen: Entry) -> str:
    if entry["epochs"] is None:
        return "-"
    return f"{entry['epochs']:.3g}, {entry['cost'] / chosen['cost']:.2f}"


def count(number: int, word: str, plural: str = "s") -> str:
    """A number and its word: 1 replica, 2 replicas."""
    return f"{number} {word}" + (plural if number != 1 else "")
