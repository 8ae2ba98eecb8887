"""The whole report of a file as markdown: how it was made, and tables."""

from __future__ import annotations

import numpy as np

from benchmarks.agent.means import log_floors, log_steps, mean_ratio, slices
from benchmarks.agent.records import AGENT, CURVE, RIVAL, Budget
from benchmarks.agent.store import Store
from benchmarks.agent.tables import (
    adapt_table,
    budgets_of,
    count_table,
    family_table,
    ratio_tables,
    run_table,
    show_mean,
    stage_table,
)
from rlplace.text import markdown


def report(store: Store) -> str:
    """How the rows were made, and the tables."""
    tables = (run_table, count_table, family_table, stage_table, adapt_table)
    parts = [how(store), *ratio_tables(store), *(table(store) for table in tables)]
    return "\n".join(part for part in parts if part)


def how(store: Store) -> str:
    """On what, by what and how the rows were made."""
    settings = ", ".join(f"{key} {value}" for key, value in store.settings.items())
    total = max((run.get("cases", 0) for run in store.runs), default=0)
    floors = [info for info in store.cases.values() if info.floor_s is not None]
    sizes = ", ".join(f"{len(keys)} {name}" for name, keys in slices(store.cases).items() if name != "all")
    lines = [
        f"{settings}. {len(store.cases)} of {total} cases ({sizes}), {len(floors)} with a floor; the others are in no mean. "
        f"Intervals: 95 %, cases resampled."
    ]
    if floors:
        seconds, calls = np.mean([info.floor_seconds for info in floors]), np.mean([info.floor_calls for info in floors])
        lines.append(f"The floor took {seconds:.2f} s and {calls:.0f} simulator calls in the mean, which are in no budget.")
    agents = [method for method in store.methods.values() if method.role == AGENT]
    if agents:
        named = ", ".join(f"{method.name} {(method.fingerprint or '')[:12]}" for method in agents)
        lines.append(f"Training seeds: {len(agents)} ({named}).")
    timed = [row for row in store.rows.values() if row.budget.endswith(" s")]
    if timed:
        processes = sorted({run.get("processes", 0) for run in store.runs})
        cores = max(run.get("cores", 0) for run in store.runs)
        late = sum(row.seconds > 1.1 * Budget.parse(row.budget).value + 0.05 for row in timed)
        load = np.array([row.load for row in timed])
        lines.append(
            f"Wall-time rows: {' or '.join(map(str, processes))} processes on {cores} cores, load average "
            f"{np.median(load):.1f} in the middle, {load.max():.1f} at most; {late} of {len(timed)} runs took a tenth too long."
        )
    alone = [name for name, info in store.cases.items() if info.floor_s is None]
    if alone:
        solved = {
            method: len({row.case for row in store.rows.values() if row.method == method and row.case in alone and row.valid})
            for method in store.methods
        }
        lines.append(
            f"Without a floor: {', '.join(alone)}. Solved of these, in some run: "
            f"{', '.join(f'{name} {count}' for name, count in solved.items())}."
        )
    over: dict[str, int] = {}
    for row in store.rows.values():
        budget = Budget.parse(row.budget)
        if budget.kind == "calls" and store.cases[row.case].floor_s is not None:
            over[row.method] = max(over.get(row.method, 0), row.calls - int(budget.value))
    many = ", ".join(f"{name} {calls}" for name, calls in over.items() if calls > 1)
    lines.append(f"Calls above the budget, at most 1 (the start itself){'' if not many else '; but ' + many}.")
    return "\n".join(lines) + "\n"


def curves(store: Store) -> str:
    """Learning curves: steps of pre-training and PPO decisions against the mean over the runs, and their spread."""
    rows = list(store.rows.values())
    floors, everything = log_floors(store.cases), list(store.cases)
    names: dict[int, list[str]] = {}
    for method in store.methods.values():
        if method.role == CURVE:
            names.setdefault(int(method.name.rpartition("@")[2]), []).append(method.name)
    blocks = [how(store)]
    for budget in budgets_of(rows):
        annealing = log_steps(rows, ["annealing"], budget)
        body = []
        for steps, members in sorted(names.items()):
            pooled = log_steps(rows, members, budget)
            each = [mean_ratio(log_steps(rows, [name], budget), floors, everything) for name in members]
            ratios = [mean.ratio for mean in each if mean is not None]
            if not ratios:
                continue
            spread = f"{min(ratios):.4f} to {max(ratios):.4f} ({len(ratios)})"
            means = [show_mean(mean_ratio(pooled, other, everything)) for other in (floors, annealing)]
            body.append([str(steps), *means, spread])
        rivals = [method.name for method in store.methods.values() if method.role == RIVAL]
        for name in rivals:
            body.append([name, show_mean(mean_ratio(log_steps(rows, [name], budget), floors, everything)), "", ""])
        head = ["steps trained", "over the floor", "over annealing", "over the floor, from run to run (runs)"]
        blocks.append(f"**{budget} after the floor**\n\n" + markdown(head, body))
    return "\n".join(blocks)
