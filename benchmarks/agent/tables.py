"""Markdown tables of a file of rows: geometric means of ratios of step times, with bootstrap intervals over cases."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from benchmarks.agent.records import ABLATION, AGENT, RIVAL, BenchmarkRow, Budget, CaseInfo, Store
from rlplace.placement.ask import OK
from rlplace.stats import interval, wins_ties_losses

WORSE = 1e-9
"""Relative amount above the floor from which a plan is worse than it."""

RESAMPLES = 10_000


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)) + "\n"


def report(store: Store) -> str:
    """Says how the rows were made, and the tables."""
    budgets = [str(budget) for budget in sorted({Budget.parse(row.budget) for row in store.rows.values()})]
    if not budgets:
        return f"{how(store)}\nno rows"
    parts = [how(store), run_table(store, budgets), count_table(store, budgets)]
    parts += [*rival_tables(store, budgets), *ratio_tables(store, budgets)]
    return "\n".join(part for part in parts if part)


def how(store: Store) -> str:
    """Returns on what, by what and how the rows were made."""
    settings = ", ".join(f"{key} {value}" for key, value in store.settings.items())
    floors = [info for info in store.cases.values() if info.floor_s is not None]
    lines = [f"{settings}. {len(store.cases)} cases, {len(floors)} with a floor; the others are in no mean."]
    if floors:
        lines.append(f"The floor took {np.mean([info.floor_seconds for info in floors]):.2f} s in the mean, in no budget.")
    timed = [row for row in store.rows.values() if row.budget.endswith(" s")]
    if timed:
        late = sum(row.seconds > 1.1 * Budget.parse(row.budget).value + 0.05 for row in timed)
        load = np.array([row.load for row in timed])
        lines.append(
            f"Wall-time rows: load average {np.median(load):.1f} in the middle, {load.max():.1f} at most; {late} of "
            f"{len(timed)} runs took a tenth too long."
        )
    for name in (name for name, info in store.cases.items() if info.floor_s is None):
        solved = sorted({row.method for row in store.rows.values() if row.case == name and row.valid})
        lines.append(f"{name} has no floor; solved in some run by {', '.join(solved) or 'nobody'}.")
    return "\n".join(lines) + "\n"


def lines_of(store: Store) -> dict[str, list[str]]:
    """Returns the lines of a table: label to the methods that it pools."""
    by_role = {role: [m.name for m in store.methods.values() if m.role == role] for role in (RIVAL, AGENT, ABLATION)}
    lines = {name: [name] for name in by_role[RIVAL]}
    if by_role[AGENT]:
        lines[AGENT] = by_role[AGENT]
    if len(by_role[AGENT]) > 1:
        lines.update({f"{AGENT} {name}": [name] for name in by_role[AGENT]})
    lines.update({f"{ABLATION}: {name}": [name] for name in by_role[ABLATION]})
    return lines


def slices(cases: Mapping[str, CaseInfo]) -> dict[str, list[str]]:
    """Returns the groups of cases that are looked at: name to case names; empty ones are left out."""
    named = {
        "all": list(cases),
        "branchy": [name for name, info in cases.items() if info.branchy],
        "chain-like": [name for name, info in cases.items() if not info.branchy],
        "unseen clusters": [name for name, info in cases.items() if info.unseen],
        "captured": [name for name, info in cases.items() if not info.family.startswith("synthetic:")],
        **{f: [name for name, info in cases.items() if info.family == f] for f in sorted({c.family for c in cases.values()})},
    }
    return {name: keys for name, keys in named.items() if keys}


def log_steps(rows: Iterable[BenchmarkRow], methods: Collection[str], budget: str) -> dict[str, float]:
    """Returns case to the mean log step time over seeds, and over methods where several are one (training seeds).

    Runs without a valid plan are left out here and counted among the violations.
    """
    logs: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.method in methods and row.budget == budget and row.valid and row.step_time_s is not None:
            logs.setdefault(row.case, {}).setdefault(row.method, []).append(math.log(row.step_time_s))
    return {case: float(np.mean([np.mean(of_seeds) for of_seeds in per.values()])) for case, per in logs.items()}


def show_ratio(ours: Mapping[str, float], theirs: Mapping[str, float], cases: Collection[str]) -> str:
    """Shows the mean of ours / theirs over the cases that both have, ``0.970 [0.960, 0.980]``, and their number if not all."""
    logs = [ours[name] - theirs[name] for name in sorted(cases) if name in ours and name in theirs]
    if not logs:
        return ""
    low, high = interval(logs, resamples=RESAMPLES)
    missing = f" ({len(logs)})" if len(logs) < len(cases) else ""
    between = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
    return f"{math.exp(float(np.mean(logs))):.4f}{between}{missing}"


def ratio_tables(store: Store, budgets: Sequence[str]) -> list[str]:
    """Makes tables over the floor on all and on branchy cases, then over annealing by slice of them; a column a budget."""
    rows, lines, parts = list(store.rows.values()), lines_of(store), slices(store.cases)
    floors = {name: math.log(info.floor_s) for name, info in store.cases.items() if info.floor_s is not None}
    annealing = {budget: log_steps(rows, ["annealing"], budget) for budget in budgets}
    logs = {(label, budget): log_steps(rows, names, budget) for label, names in lines.items() for budget in budgets}

    def table(title: str, keys: Collection[str], against: Mapping[str, Mapping[str, float]]) -> str:
        body = [[label, *(show_ratio(logs[label, budget], against[budget], keys) for budget in budgets)] for label in lines]
        return markdown([title, *budgets], [line for line in body if against is not annealing or line[0] != "annealing"])

    over = dict.fromkeys(budgets, floors)
    first = [
        table(f"over the floor, {name}, {len(parts[name])} cases", parts[name], over)
        for name in ("all", "branchy")
        if name in parts
    ]
    if not any(annealing.values()):
        return first
    return first + [table(f"over annealing, {name}, {len(keys)} cases", keys, annealing) for name, keys in parts.items()]


def rival_tables(store: Store, budgets: Sequence[str]) -> list[str]:
    """Returns step time of the agent over that of every other method, on all, branchy and captured cases; a column a budget.

    The last line is over the rival whose mean step time is the least at that budget, of those on the most cases: it is chosen
    on the cases that it is judged on, which favours it.
    """
    rows, lines, parts = list(store.rows.values()), lines_of(store), slices(store.cases)
    if AGENT not in lines:
        return []
    logs = {(label, budget): log_steps(rows, names, budget) for label, names in lines.items() for budget in budgets}
    rivals = [method.name for method in store.methods.values() if method.role == RIVAL]

    def best(budget: str) -> str:
        means = {name: (-len(logs[name, budget]), float(np.sum([*logs[name, budget].values()]))) for name in rivals}
        return min(means, key=lambda name: means[name], default="")

    quickest, found = {budget: best(budget) for budget in budgets}, []
    for part in (name for name in ("all", "branchy", "captured") if name in parts):
        body = [
            [label, *(show_ratio(logs[AGENT, budget], logs[label, budget], parts[part]) for budget in budgets)]
            for label in lines
            if not label.startswith(AGENT)
        ]
        body = [line for line in body if any(line[1:])]
        over = [show_ratio(logs[AGENT, b], logs.get((quickest[b], b), {}), parts[part]) for b in budgets]
        body.append(["the best rival", *(f"{ratio} {quickest[b]}".strip() for ratio, b in zip(over, budgets, strict=True))])
        found.append(markdown([f"the agent over, {part}, {len(parts[part])} cases", *budgets], body))
    return found


def run_table(store: Store, budgets: Sequence[str]) -> str:
    """Says what went wrong, and mean seconds and simulator calls a second of a run, a column a budget."""
    body = []
    for label, names in lines_of(store).items():
        mine = [row for row in store.rows.values() if row.method in names]
        cells = [label, str(len(mine)), *map(str, faults(mine, store))]
        for budget in budgets:
            part = [row for row in mine if row.budget == budget]
            seconds, calls = sum(row.seconds for row in part), sum(row.calls for row in part)
            cells.append(f"{seconds / len(part):.3f} s, {calls / max(seconds, 1e-9):,.0f}/s" if part else "")
        body.append(cells)
    return markdown(["method", "runs", "no valid plan", "worse than the floor", *budgets], body)


def count_table(store: Store, budgets: Sequence[str]) -> str:
    """Counts cases where the agent is faster than, level with and slower than each classical search; empty without it."""
    rows = list(store.rows.values())
    names = [method.name for method in store.methods.values() if method.role == AGENT]
    body = []
    for rival in (method.name for method in store.methods.values() if method.role == RIVAL and names):
        cells = [rival]
        for budget in budgets:
            ours, theirs = log_steps(rows, names, budget), log_steps(rows, [rival], budget)
            ratios = [math.exp(ours[case] - theirs[case]) for case in ours if case in theirs]
            cells.append(" / ".join(map(str, wins_ties_losses(ratios))) if ratios else "")
        body.append(cells)
    return markdown(["cases where the agent is faster / level / slower", *budgets], body) if body else ""


def faults(rows: Collection[BenchmarkRow], store: Store) -> tuple[int, int]:
    """Returns rows without a valid plan although the floor has one, and rows whose plan is worse than the floor."""
    bad = worse = 0
    for row in rows:
        floor_s = store.cases[row.case].floor_s
        if row.violation is not None and (floor_s is not None or row.status == OK):
            bad += 1
        elif row.step_time_s is not None and floor_s is not None and row.step_time_s > floor_s * (1 + WORSE):
            worse += 1
    return bad, worse
