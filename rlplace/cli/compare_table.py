"""A comparison for people, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.cli.output import print_table
from rlplace.files import canonical_json
from rlplace.text import ms, percent

if TYPE_CHECKING:
    from rlplace.explanation.compare import Comparison, ComparisonRow, ProblemInfo, Summary

_BOUNDS = ("critical_path_s", "work_s", "largest_group_s", "memory_forced_s", "least_devices")


def print_comparison(comparison: Comparison) -> None:
    """Prints problems, rows and summaries."""
    from rlplace.explanation.compare.records import REFERENCE

    if not comparison.rows:
        print("no rows")
        return
    print_table(
        ["problem", "groups", "bound ms", "binds", "critical path", "work", "largest group", "memory", "least devices"],
        [_problem_cells(info) for info in comparison.problems],
    )
    print()
    print_table(
        ["problem", "planner", "step ms", "spread ms", "samples/s", "R x M", f"vs {REFERENCE}", "gap", "memory",
         "calls", "seconds", "<"],
        _row_cells(comparison.rows),
    )  # fmt: skip
    print_summaries(comparison, "all problems")


def print_summaries(comparison: Comparison, title: str) -> None:
    """Prints a line a planner and view, and what the numbers are."""
    from rlplace.explanation.compare.records import REFERENCE, VIEWS
    from rlplace.stats import TIE

    for view in dict.fromkeys(summary.view for summary in comparison.summaries):
        print(f"\n{title}, {VIEWS[view]}")
        print_table(
            ["planner", "feasible", f"vs {REFERENCE}", "95 % interval", "wins", "ties", "losses", f"only {REFERENCE}",
             "only it", "gap", "calls", "seconds"],
            [_summary_cells(summary) for summary in comparison.summaries if summary.view == view],
        )  # fmt: skip
    print(f"\n{legend(comparison, REFERENCE, TIE)}")


def legend(comparison: Comparison, reference: str, tie: float) -> str:
    """Explains the numbers of a table: executor, budget, reference and seeds."""
    from rlplace.explanation.compare.rows import STRATEGIES

    settings = comparison.settings
    budget = f"{settings.time_limit_s:g} s a plan"
    if settings.calls is not None:
        budget = f"{settings.calls} simulator calls after the floor for every search, {budget} for the others"
    used = {row.planner: row.random for row in comparison.rows}
    shuffled = [name for name, flag in used.items() if flag]
    rest = [name for name, flag in used.items() if not flag]
    lines = [
        f"executor list, simulated; every plan simulated anew; budget: {budget}",
        f"vs {reference}: step time over that of {reference} on the same problem, geometric mean over problems, below 1 is "
        f"faster; a tie is within {100 * tie:g} %",
        "gap: step time over the largest lower bound, minus 1; "
        "memory: largest share of a device's memory; calls: simulator calls, floor included",
    ]
    if set(used) & set(STRATEGIES):
        lines.append(
            f"{', '.join(name for name in used if name in STRATEGIES)}: whole strategies for as many samples a step, searched "
            "under the same budget and simulated block by block; the other planners place one pass of these samples; attention "
            "under a causal mask is priced as causal for all"
        )
    if shuffled:
        spread = "; spread is the largest minus the smallest" if settings.seeds > 1 else ""
        seeds = f"seeds 0 to {settings.seeds - 1}" if settings.seeds > 1 else "seed 0"
        lines.append(f"{seeds}: {', '.join(shuffled)}{spread}")
    if rest:
        lines.append(f"no seed, run once: {', '.join(rest)}")
    return "\n".join(lines)


def to_csv(comparison: Comparison) -> str:
    """Returns one line a row, with the bounds of its problem; empty where there is no value."""
    from msgspec.structs import asdict

    problems = {info.key: info for info in comparison.problems}
    stream = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in comparison.rows:
        info = problems[row.model, row.cluster, row.view]
        data = {**asdict(row), "feasible": row.feasible, "fingerprint": info.fingerprint, "samples": info.samples}
        data |= {name: getattr(info, name) for name in _BOUNDS} | {"settings": canonical_json(asdict(comparison.settings))}
        if writer is None:
            writer = csv.DictWriter(stream, list(data), lineterminator="\n")
            writer.writeheader()
        writer.writerow(data)
    return stream.getvalue()


def place_of(model: str, cluster: str, view: str) -> str:
    """Returns a problem by name."""
    return model + (f" on {cluster}" if cluster else "") + ("" if view == "tasks" else f", {view}")


def _problem_cells(info: ProblemInfo) -> list[str]:
    parts = (info.critical_path_s, info.work_s, info.largest_group_s, info.memory_forced_s)
    bound, binding = info.bound
    least = "none fits" if info.least_devices is None else f"{info.least_devices} of {info.devices}"
    return [
        place_of(info.model, info.cluster, info.view), str(info.groups), ms(bound), binding,
        *(ms(part) for part in parts), least,
    ]  # fmt: skip


def _row_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    table, last = [], ""
    for row in rows:
        name = place_of(row.model, row.cluster, row.view)
        note = row.reason or ""
        if row.status != "ok":
            partly = f", {row.feasible_seeds} of {row.seeds} seeds found a plan" if row.feasible_seeds else ""
            note = f"{row.status}{partly}: {note}"
        table.append(
            [
                name if name != last else "",
                row.planner,
                ms(row.step_time_s),
                "" if row.spread_s is None else ms(row.spread_s),
                _number(row.samples_per_s, ".2f"),
                "-" if row.replicas is None else f"{row.replicas} x {row.microbatches}",
                _number(row.ratio, ".4f"),
                percent(row.gap),
                percent(row.memory_share),
                f"{row.simulator_calls:.0f}",
                f"{row.seconds:.2f}",
                note if len(note) <= 100 else f"{note[:97]}...",
            ]
        )
        last = name
    return table


def _summary_cells(summary: Summary) -> list[str]:
    interval = "-" if summary.low is None else f"{summary.low:.4f} to {summary.high:.4f}"
    return [
        summary.planner, f"{summary.feasible}/{summary.problems}", _number(summary.ratio, ".4f"), interval, str(summary.wins),
        str(summary.ties), str(summary.losses), str(summary.only_reference), str(summary.only_it), percent(summary.gap),
        f"{summary.simulator_calls:.0f}", f"{summary.seconds:.2f}",
    ]  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
