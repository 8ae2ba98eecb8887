"""Predicts every published training step whose strategy can be expressed, and says how far off that is.

    python -m benchmarks.truth STEPS.csv [--only TEXT] [--save FILE]

STEPS.csv holds published steps (model, devices, strategy, batch, precision, tokens/s a device, ms a step or peak memory); it is
no part of this repository. Sources are split in halves: what the benchmark or the cost model takes from such rows comes from
`FIT` alone, the others are for testing. Printed are every row, errors by source (signed mean, mean, median and 90th percentile
of the absolute ones), order among strategies of one model and cluster, peak memory, and every row that is not priced, with the
reason. What ran in eight bits is priced as bf16 and counted apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import arguments, one_thread
from benchmarks.published.price import Said, say
from benchmarks.published.rows import Excluded, Row, degrees, read

FIT = (
    "mosaicml/llm-foundry", "sail-sg", "cortwave", "NVIDIA DeepLearningExamples", "gist", "Dazz993/Mist", "AMD-AGI/Primus",
    "jzhang38",
)  # fmt: skip
"""Sources whose rows may be fitted on; those of the other eight are for testing."""


def half_of(row: Row) -> str:
    """Returns the half that a row's source is in, "fit" or "test"."""
    return "fit" if row.source.startswith(FIT) else "test"


def show(said: Said) -> str:
    """Returns a line about a row."""
    row = said.row
    name = f"  {row.words[:44]:44s}{row.recompute[:12]:13s}{row.microbatch:4d}"
    if said.step_s is None:
        return f"{name}   not priced: {said.reason}"
    taken = "" if row.taken_s is None else f"{1e3 * row.taken_s:10.1f}"
    error = "" if row.taken_s is None else f"{100 * said.error:+7.0f} %"
    over = f", {said.over_bytes / 1e9:.1f} GB over" if said.over_bytes else ""
    parts = " ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in said.parts.items() if seconds > 0.005 * said.step_s)
    return f"{name}{taken:>10s}{1e3 * said.step_s:10.1f} ms{error:>9s}  {max(said.peak_bytes) / 1e9:5.1f} GB{over}  ({parts})"


def errors(found: Iterable[Said]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns signed errors of the rows that were timed and priced."""
    return np.array([said.error for said in found if said.step_s is not None and said.row.taken_s is not None])


def summary(name: str, found: Sequence[Said]) -> str:
    """Returns errors of some rows in one line."""
    off = 100 * errors(found)
    if not len(off):
        return f"{name:44s}   0"
    size = np.abs(off)
    return (
        f"{name:44s}{len(off):4d}{off.mean():+8.1f}{size.mean():8.1f}{np.median(size):8.1f}{np.quantile(size, 0.9):8.1f}"
        f"{size.max():8.1f}"
    )


def rule_of_thumb(rows: Iterable[Row]) -> Row:
    """Says what the rule of thumb takes: sharded optimizer, least tensor x pipeline, tensor at most 8, largest micro-batch."""

    def key(row: Row) -> tuple[float, ...]:
        said = degrees(row.words, row.gpus)
        width = said["tensor"] * said["pipeline"] * said["context"]
        return (said["tensor"] > 8, width, said["level"] == 0, said["pipeline"], len(row.recompute), -row.microbatch)

    return min(rows, key=key)


def judge(found: Sequence[Said]) -> dict[str, Any]:
    """Judges a group: performance of the planner's pick, its first three and the rule's beside the best; rank order."""
    timed = [said for said in found if said.row.taken_s is not None and said.step_s is not None]
    best = min(timed, key=lambda said: said.row.taken_s or 0.0).row
    ranked = sorted(timed, key=lambda said: (said.over_bytes, said.step_s))
    predicted, taken = np.array([said.step_s for said in timed]), np.array([said.row.taken_s for said in timed])
    pairs = [(i, j) for i in range(len(timed)) for j in range(i)]
    right = [np.sign(predicted[i] - predicted[j]) == np.sign(taken[i] - taken[j]) for i, j in pairs]
    assert best.taken_s is not None
    return {
        "measured best": best.words,
        "pick": ranked[0].row.words,
        "planner": best.taken_s / (ranked[0].row.taken_s or 1.0),
        "first three": best.taken_s / min(said.row.taken_s or 1.0 for said in ranked[:3]),
        "rule": best.taken_s / (rule_of_thumb([said.row for said in timed]).taken_s or 1.0),
        "pairs in order": float(np.mean(right)),
    }


def report(found: Sequence[Said], excluded: Sequence[Excluded], judged: Sequence[dict[str, Any]]) -> None:
    """Prints the tables."""
    head = f"{'':44s}rows  signed    mean  median     p90   worst"
    print(f"\nErrors of step times in %, predicted over measured\n{head}")
    strict = [said for said in found if said.row.strict]
    for half in ("fit", "test"):
        print(summary(f"stated in full, 16 bits or more: {half}", [said for said in strict if half_of(said.row) == half]))
    print(summary("stated in full, 16 bits or more", strict))
    print(summary("eight bits, priced as bf16", [said for said in found if said.row.precision == "fp8"]))
    other = [said for said in found if not said.row.strict and said.row.precision != "fp8"]
    print(summary("other devices, or something assumed", other))
    print(f"\nBy source\n{head}")
    for name in sorted({said.row.source.split()[0] for said in found}):
        own = [said for said in found if said.row.source.split()[0] == name]
        print(summary(f"{name} ({half_of(own[0].row)})", own))
    print("\nOrder among strategies of one model and cluster")
    for name in ("planner", "first three", "rule", "pairs in order"):
        shares = [entry[name] for entry in judged]
        if shares:
            mean = np.mean(shares) if "pairs" in name else np.exp(np.log(shares).mean())
            print(f"  {name}: {mean:.3f}, worst {min(shares):.3f}, {len(shares)} groups")
    memory = [said for said in found if said.row.peak_bytes and said.step_s is not None]
    if memory:
        print("\nPeak memory, GB")
    for said in memory:
        measured, own = max(said.row.peak_bytes), max(said.peak_bytes)
        print(f"  {said.row.model:14s}{said.row.words[:34]:36s}{said.row.recompute:6s}"
              f"{measured / 1e9:7.1f}{own / 1e9:7.1f}{100 * (own / measured - 1):+7.0f} %")  # fmt: skip
    print(f"\nNot priced: {len(excluded) + sum(said.step_s is None for said in found)}")
    for entry in excluded:
        print(f"  {entry.source[:40]:42s}{entry.model[:20]:22s}{entry.words[:34]:36s}{entry.reason}")
    for said in found:
        if said.step_s is None:
            print(f"  {said.row.source[:40]:42s}{said.row.model[:20]:22s}{said.row.words[:34]:36s}{said.reason}")


def main() -> None:
    """Predicts all steps and prints the tables."""
    options = arguments(
        __doc__,
        "steps",
        only=("", "groups whose model, source or devices hold this text"),
        save=(None, "write predictions as JSON"),
    )
    steps = Path(next(iter(options.steps), "steps.csv"))
    if not steps.exists():
        print(f"{steps}: not there; the published steps are no part of this repository, nothing to compare", file=sys.stderr)
        return
    one_thread()
    rows, excluded = read(steps)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if options.only in ", ".join(row.group):
            groups.setdefault(row.group, []).append(row)
    found: list[Said] = []
    saved: list[dict[str, Any]] = []
    for key, members in sorted(groups.items()):
        print(", ".join(key), flush=True)
        own = []
        for row in members:
            own.append(say(row))
            print(show(own[-1]), flush=True)
        timed = [said for said in own if said.row.taken_s and said.step_s]
        judged = judge(own) if len({said.row.words + said.row.recompute for said in timed}) > 1 else {}
        predicted = [
            {"strategy": one.row.words, "recompute": one.row.recompute, "predicted_s": one.step_s and round(one.step_s, 4)}
            for one in own
        ]
        saved.append({"group": key, "judged": judged, "rows": predicted})
        found += own
    report(found, excluded, [entry["judged"] for entry in saved if entry["judged"]])
    if options.save is not None:
        Path(options.save).write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
