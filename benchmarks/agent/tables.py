"""Markdown tables of a file of rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from benchmarks.agent.means import FLOOR, Mean, families, log_floors, log_steps, mean_ratio, slices
from benchmarks.agent.records import ABLATION, AGENT, OK, RIVAL, Budget, Row
from benchmarks.agent.store import Store

WORSE = 1e-9
"""Relative amount above the floor from which a plan is worse than it."""

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
    lines.update({f"without: {name}": [name] for name in by_role[ABLATION]})
    return lines


def budgets_of(rows: Sequence[Row]) -> list[str]:
    """Texts of the budgets that there are rows of, calls first, small ones first."""
    return [str(budget) for budget in sorted({Budget.parse(row.budget) for row in rows})]


def main_tables(store: Store) -> list[str]:
    """A table a budget: step time over the floor's and over annealing's, by slice of the cases."""
    rows = [row for row in store.rows.values() if store.methods[row.method].role in (RIVAL, AGENT, ABLATION)]
    parts = slices(store.cases)
    floors = log_floors(store.cases)
    blocks = []
    for budget in budgets_of(rows):
        annealing = log_steps(rows, ["annealing"], budget)
        head = ["method", f"over the {FLOOR}", "over annealing"]
        head += [f"{name}, over annealing" for name in parts if name != "all"]
        head += ["no valid plan", f"worse than {FLOOR}", "seconds", "calls/s"]
        body = []
        for label, names in lines_of(store).items():
            mine = [row for row in rows if row.method in names and row.budget == budget]
            if not mine:
                continue
            logs = log_steps(mine, names, budget)
            cells = [label, show_mean(mean_ratio(logs, floors, parts["all"]))]
            cells += [show_mean(mean_ratio(logs, annealing, keys)) for keys in parts.values()]
            bad, worse = faults(mine, store)
            seconds, calls = sum(row.seconds for row in mine), sum(row.calls for row in mine)
            cells += [f"{bad}/{len(mine)}", str(worse), f"{seconds / len(mine):.3f}", f"{calls / max(seconds, 1e-9):.0f}"]
            body.append(cells)
        blocks.append(f"**{budget} after the floor**\n\n" + markdown(head, body))
    return blocks


def family_table(store: Store) -> str:
    """The agent over annealing by model family, a column a budget."""
    rows = list(store.rows.values())
    names = [method.name for method in store.methods.values() if method.role == AGENT]
    budgets = budgets_of([row for row in rows if row.method in names])
    body = []
    for family, keys in families(store.cases).items():
        cells = [family, str(len(keys))]
        for budget in budgets:
            mean = mean_ratio(log_steps(rows, names, budget), log_steps(rows, ["annealing"], budget), keys)
            cells.append(show_mean(mean))
        body.append(cells)
    return markdown(["family, agent over annealing", "cases", *budgets], body)


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
    return markdown(["method", "stage (the floor counts in)", f"over the {FLOOR}"], body)


def faults(rows: Collection[Row], store: Store) -> tuple[int, int]:
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


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
