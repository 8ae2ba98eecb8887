"""A comparison for people, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.cli.common import print_table
from rlplace.files import canonical_json
from rlplace.text import ms, percent

if TYPE_CHECKING:
    from rlplace.comparing import Comparison, ComparisonRow, ProblemInfo, Summary

_BOUNDS = ("critical_path_s", "work_s", "largest_group_s", "memory_forced_s", "least_devices")


def print_comparison(comparison: Comparison) -> None:
    """Prints problems, rows and summaries."""
    from rlplace.comparing.records import REFERENCE
    from rlplace.means import TIE

    if not comparison.rows:
        print("no rows")
        return
    print_table(
        ["problem", "groups", "bound ms", "binds", "critical path", "work", "largest group", "memory", "least devices"],
        [_problem_cells(info) for info in comparison.problems],
    )
    print()
    print_table(
        ["problem", "planner", "metric", "step ms", "spread ms", "samples/s", "R x M", f"vs {REFERENCE}", "gap", "memory",
         "calls", "seconds", "<"],
        _row_cells(comparison.rows),
    )  # fmt: skip
    for metric in dict.fromkeys(summary.metric for summary in comparison.summaries):
        print(f"\nall problems, {metric}")
        print_table(
            ["planner", "feasible", f"vs {REFERENCE}", "95 % interval", "wins", "ties", "losses", f"only {REFERENCE}",
             "only it", "gap", "calls", "seconds"],
            [_summary_cells(summary) for summary in comparison.summaries if summary.metric == metric],
        )  # fmt: skip
    print(f"\n{legend(comparison, REFERENCE, TIE)}")


def legend(comparison: Comparison, reference: str, tie: float) -> str:
    """What the numbers are; a table without it is worth nothing."""
    from rlplace.comparing.strategies import STRATEGIES

    settings = comparison.settings
    budget = f"{settings.time_limit_s:g} s a plan"
    if settings.calls is not None:
        budget = f"{settings.calls} simulator calls after the floor for every search, {budget} for the others"
    used = {row.planner: row.random for row in comparison.rows}
    shuffled = [name for name, flag in used.items() if flag]
    rest = [name for name, flag in used.items() if not flag]
    lines = [
        f"executor list, simulated; every plan simulated anew; budget: {budget}",
        f"vs {reference}: step time over that of {reference} in the same metric with the same samples a step, geometric mean "
        f"over problems, below 1 is faster; a tie is within {100 * tie:g} %; metrics are never mixed",
        "gap: step time over the largest lower bound of plans with these micro-batches, minus 1; "
        "memory: largest share of a device's memory; calls: simulator calls, floor included",
    ]
    if set(used) & set(STRATEGIES):
        lines.append(
            f"{', '.join(name for name in used if name in STRATEGIES)}: whole strategies for as many samples a step, searched "
            "under the same budget and simulated block by block; the other planners place one pass of these samples, or the "
            "micro-batches that were asked for; attention under a causal mask is priced as causal for all"
        )
    if shuffled:
        spread = "; spread is the largest minus the smallest" if settings.seeds > 1 else ""
        seeds = f"seeds 0 to {settings.seeds - 1}" if settings.seeds > 1 else "seed 0"
        lines.append(f"{seeds}: {', '.join(shuffled)}{spread}")
    if rest:
        lines.append(f"no seed, run once: {', '.join(rest)}")
    return "\n".join(lines)


def to_csv(comparison: Comparison) -> str:
    """One line a row, with the bounds of its problem; empty where there is no value."""
    from msgspec.structs import asdict

    problems = {info.key: info for info in comparison.problems}
    stream = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in comparison.rows:
        info = problems[row.model, row.cluster, row.view]
        data = {**asdict(row), "feasible": row.feasible, "fingerprint": info.fingerprint}
        data |= {name: getattr(info, name) for name in _BOUNDS} | {"settings": canonical_json(asdict(comparison.settings))}
        if writer is None:
            writer = csv.DictWriter(stream, list(data), lineterminator="\n")
            writer.writeheader()
        writer.writerow(data)
    return stream.getvalue()


def place_of(model: str, cluster: str, view: str) -> str:
    """A problem by name."""
    return model + (f" on {cluster}" if cluster else "") + ("" if view == "tasks" else f", {view}")


def _problem_cells(info: ProblemInfo) -> list[str]:
    from rlplace.planners.common.bounds import largest

    parts = (info.critical_path_s, info.work_s, info.largest_group_s, info.memory_forced_s)
    bound, binding = largest(*parts)
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
                _short(row),
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


def _short(row: ComparisonRow) -> str:
    """The metric in one word; with the samples a step where there are several micro-batches or replicas."""
    from rlplace.comparing.records import MAKESPAN

    if row.metric.startswith(MAKESPAN):
        return "step"
    return f"rate of {row.samples}" if row.samples else "rate"


def _summary_cells(summary: Summary) -> list[str]:
    interval = "-" if summary.low is None else f"{summary.low:.4f} to {summary.high:.4f}"
    return [
        summary.planner, f"{summary.feasible}/{summary.problems}", _number(summary.ratio, ".4f"), interval, str(summary.wins),
        str(summary.ties), str(summary.losses), str(summary.only_reference), str(summary.only_it), percent(summary.gap),
        f"{summary.simulator_calls:.0f}", f"{summary.seconds:.2f}",
    ]  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
