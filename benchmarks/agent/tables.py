"""Markdown tables of a file of rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from benchmarks.agent.means import FLOOR, Mean, families, log_floors, log_steps, mean_ratio, slices
from benchmarks.agent.records import ABLATION, ADAPT, AGENT, OK, RIVAL, BenchmarkRow, Budget
from benchmarks.agent.store import Store
from rlplace.means import wins_ties_losses
from rlplace.text import markdown

WORSE = 1e-9
"""Relative amount above the floor from which a plan is worse than it."""

ADAPT_BUDGET = "30 s"

_AGENTS = "agent"
"""Label of all training seeds together."""


def lines_of(store: Store) -> dict[str, list[str]]:
    """The lines of a table: label to the methods that it pools."""
    by_role = {role: [m.name for m in store.methods.values() if m.role == role] for role in (RIVAL, AGENT, ABLATION)}
    lines = {name: [name] for name in by_role[RIVAL]}
    if by_role[AGENT]:
        lines[_AGENTS] = by_role[AGENT]
    if len(by_role[AGENT]) > 1:
        lines.update({f"{_AGENTS} {name}": [name] for name in by_role[AGENT]})
    lines.update({f"ablation: {name}": [name] for name in by_role[ABLATION]})
    return lines


def budgets_of(rows: Sequence[BenchmarkRow]) -> list[str]:
    """Texts of the budgets that there are rows of, calls first, small ones first."""
    return [str(budget) for budget in sorted({Budget.parse(row.budget) for row in rows})]


def _budgets(store: Store, rows: Sequence[BenchmarkRow]) -> list[str]:
    """Those of the agents; what only classical searches were run for, such as rivals of adapting, has tables of its own."""
    learned = [row for row in rows if store.methods[row.method].role != RIVAL]
    return budgets_of(learned or rows)


def ratio_tables(store: Store) -> list[str]:
    """Step time over the floor's on all and on branchy cases, then over annealing's by slice of them; a column a budget."""
    rows = _rows(store)
    floors, budgets = log_floors(store.cases), _budgets(store, rows)
    annealing = {budget: log_steps(rows, ["annealing"], budget) for budget in budgets}
    logs = {(label, budget): log_steps(rows, names, budget) for label, names in lines_of(store).items() for budget in budgets}

    def partly(mean: Mean | None, keys: Collection[str]) -> str:
        """A mean over fewer cases than there are says so."""
        missing = mean is not None and mean.count < sum(key in floors for key in keys)
        return show_mean(mean) + (f" ({mean.count})" if mean is not None and missing else "")

    def table(title: str, keys: Collection[str], against: Mapping[str, Mapping[str, float]]) -> str:
        body = [
            [label, *(partly(mean_ratio(logs[label, budget], against[budget], keys), keys) for budget in budgets)]
            for label, names in lines_of(store).items()
            if against is not annealing or names != ["annealing"]
        ]
        return markdown([title, *budgets], body)

    parts = slices(store.cases)
    over = dict.fromkeys(budgets, floors)
    first = [table(f"over the {FLOOR}, {len(store.cases)} cases", list(store.cases), over)]
    first += [
        table(f"over the {FLOOR}, {len(parts[name])} {name}", parts[name], over) for name in ("branchy",) if name in parts
    ]
    return first + [table(f"over annealing, {name}, {len(keys)} cases", keys, annealing) for name, keys in parts.items()]


def run_table(store: Store) -> str:
    """What went wrong, and mean seconds and simulator calls a second of a run, a column a budget."""
    rows = _rows(store)
    budgets = _budgets(store, rows)
    body = []
    for label, names in lines_of(store).items():
        mine = [row for row in rows if row.method in names]
        bad, worse = faults(mine, store)
        cells = [label, str(len(mine)), str(bad), str(worse)]
        for budget in budgets:
            part = [row for row in mine if row.budget == budget]
            seconds, calls = sum(row.seconds for row in part), sum(row.calls for row in part)
            cells.append(f"{seconds / len(part):.3f} s, {calls / max(seconds, 1e-9):,.0f}/s" if part else "")
        body.append(cells)
    return markdown(["method", "runs", "no valid plan", f"worse than the {FLOOR}", *budgets], body)


def _rows(store: Store) -> list[BenchmarkRow]:
    return [row for row in store.rows.values() if store.methods[row.method].role in (RIVAL, AGENT, ABLATION)]


def family_table(store: Store) -> str:
    """The agent over annealing by model family, a column a budget; empty without an agent, and so the following."""
    rows = list(store.rows.values())
    names = [method.name for method in store.methods.values() if method.role == AGENT]
    budgets = budgets_of([row for row in rows if row.method in names])
    if not budgets:
        return ""
    body = []
    for family, keys in families(store.cases).items():
        cells = [family, str(len(keys))]
        for budget in budgets:
            mean = mean_ratio(log_steps(rows, names, budget), log_steps(rows, ["annealing"], budget), keys)
            cells.append(show_mean(mean))
        body.append(cells)
    return markdown(["family, agent over annealing", "cases", *budgets], body)


def count_table(store: Store) -> str:
    """Where the agent is faster, as fast (see `rlplace.means.TIE`) and slower than each classical search, a column a budget."""
    rows = _rows(store)
    names = [method.name for method in store.methods.values() if method.role == AGENT]
    budgets = budgets_of([row for row in rows if row.method in names])
    if not budgets:
        return ""
    body = []
    for rival in (method.name for method in store.methods.values() if method.role == RIVAL):
        cells = [rival]
        for budget in budgets:
            ours, theirs = log_steps(rows, names, budget), log_steps(rows, [rival], budget)
            ratios = [math.exp(ours[case] - theirs[case]) for case in ours if case in theirs]
            cells.append(" / ".join(map(str, wins_ties_losses(ratios))) if ratios else "")
        body.append(cells)
    return markdown(["cases where the agent is faster / level / slower", *budgets], body)


def stage_table(store: Store) -> str:
    """What the agent has before it searches: its first rollout alone (N = 1), and what else its plans tell, over the floor."""
    floors = log_floors(store.cases)
    body = []
    labels = [(label, names) for label, names in lines_of(store).items() if store.methods[names[0]].role != RIVAL]
    for label, names in labels:
        mine = [row for row in store.rows.values() if row.method in names and row.status == OK]
        for stage in sorted({stage for row in mine for stage in row.stages if stage != "floor"}):
            logs: dict[str, list[float]] = {}
            for row in mine:
                if stage in row.stages and row.case in floors:
                    logs.setdefault(row.case, []).append(min(np.log(row.stages[stage]), floors[row.case]))
            mean = mean_ratio({case: float(np.mean(found)) for case, found in logs.items()}, floors, logs)
            body.append([label, stage.replace("_", " "), show_mean(mean)])
    return markdown(["method", "stage (the floor counts in)", f"over the {FLOOR}"], body) if body else ""


def adapt_table(store: Store) -> str:
    """A line an instance that was adapted to: annealing, adapted and the best plan of any row, over the floor; or empty."""
    rows = list(store.rows.values())
    names = [method.name for method in store.methods.values() if method.role == ADAPT]
    ours, theirs = log_steps(rows, names, ADAPT_BUDGET), log_steps(rows, ["annealing"], ADAPT_BUDGET)
    best = {name: math.inf if info.floor_s is None else info.floor_s for name, info in store.cases.items()}
    for row in rows:
        if row.valid and row.step_time_s is not None:
            best[row.case] = min(best[row.case], row.step_time_s)
    body = []
    for name in sorted(set(ours) & set(theirs)):
        floor_s = store.cases[name].floor_s or math.nan
        values = (math.exp(theirs[name]), math.exp(ours[name]), best[name])
        body.append([name, *(f"{value / floor_s:.4f}" for value in values)])
    return markdown(["instance", f"annealing, {ADAPT_BUDGET}, over the floor", "adapted", "best known"], body) if body else ""


def faults(rows: Collection[BenchmarkRow], store: Store) -> tuple[int, int]:
    """Rows without a valid plan although the floor has one, and rows whose plan is worse than the floor."""
    bad = worse = 0
    for row in rows:
        floor_s = store.cases[row.case].floor_s
        if row.violation is not None and (floor_s is not None or row.status == OK):
            bad += 1
        elif row.step_time_s is not None and floor_s is not None and row.step_time_s > floor_s * (1 + WORSE):
            worse += 1
    return bad, worse


def show_mean(mean: Mean | None) -> str:
    """``0.970 [0.960, 0.980]``, an empty cell where there is nothing."""
    if mean is None:
        return ""
    if mean.low is None or mean.high is None:
        return f"{mean.ratio:.4f}"
    return f"{mean.ratio:.4f} [{mean.low:.4f}, {mean.high:.4f}]"
