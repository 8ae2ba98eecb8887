"""`best` on graphs of 20,000 to 100,000 ops: seconds without a limit, how late it is with one; the table of docs/results.md.

    python -m benchmarks.large_graphs                  all rows, a quarter of an hour of one idle core
    python -m benchmarks.large_graphs --ops 20000      graphs of that many ops at most; rows of others stay
    python -m benchmarks.large_graphs --table          the table again

Rows of the code before repair, refinement and clock were changed have ``"code": "before"``. Kernels are compiled. All seconds
are of the processor, which is the clock of the limit here, too: other processes of the machine do not count. *Late* is what
passes from the call of the planner to its plan beyond the limit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import ROOT, Row, add_row, arguments, markdown, one_thread, read_rows, write_between, write_rows
from rlplace import budget
from rlplace.errors import InfeasibleError
from rlplace.placement import run_planner
from rlplace.problem.generate import random_problem

ROWS, PAGE, LIMIT_S = Path(__file__).with_suffix(".rows.jsonl"), ROOT / "docs/results.md", 5.0
CASES: list[tuple[str, int, int, float | None, dict[str, Any]]] = [
    ("layered", 33400, 8, None, {}), ("layered", 33400, 8, 1.3, {}), ("layered", 33400, 8, 1.0, {}),
    ("layered", 33400, 16, 1.05, {"unlike": True, "hosts": 2, "width": 16}),
    ("wavefront", 33400, 4, 1.05, {"unlike": True, "null_fraction": 0.1}), ("chain", 100000, 8, 1.05, {"training": False}),
    ("branchy", 20000, 2, 1.3, {}), ("towers", 33400, 16, 1.1, {"hosts": 2, "width": 16}),
    ("wavefront", 6700, 8, 1.1, {"width": 32}), ("layered", 6700, 8, 1.02, {"unlike": True}),
    ("branchy", 6700, 16, 1.3, {"null_fraction": 0.1, "hosts": 4, "unlike": True}),
    ("towers", 13400, 4, None, {"unlike": True}), ("wavefront", 20000, 2, 1.05, {"width": 64}),
    ("branchy", 33400, 12, 1.02, {"unlike": True, "width": 8}), ("layered", 50000, 16, 1.2, {"training": False, "width": 64}),
]  # fmt: skip
"""Shape, groups, devices, memory factor and further arguments of `random_problem`; the seed is the place from 1 on."""


def row(seed: int, limit_s: float | None) -> Row:
    """Asks once; the step is null where no plan was found."""
    shape, groups, devices, factor, more = CASES[seed - 1]
    problem, step_s = random_problem(seed, groups, devices, shape=shape, memory_factor=factor, **more), None
    begun_s = time.process_time()
    try:
        step_s = run_planner("best", problem, time_limit_s=limit_s).plan.predicted.step_time_s
    except InfeasibleError:
        pass
    took_s = time.process_time() - begun_s
    return {"code": "now", "seed": seed, "ops": problem.num_ops, "limit_s": limit_s, "took_s": took_s, "step_s": step_s}


def shown(one: Row | None) -> str:
    """Shows the step time of a row."""
    return "" if one is None else "nothing fits" if one["step_s"] is None else f"{one['step_s']:.2f}"


def table() -> str:
    """Makes the table of the page."""
    found = {(one["code"], one["seed"], one["limit_s"]): one for one in read_rows(ROWS)}
    lines = []
    for seed, (shape, _, devices, factor, more) in enumerate(CASES, 1):
        free, limited = ([found.get((code, seed, limit)) for code in ("before", "now")] for limit in (None, LIMIT_S))
        if limited[1] is None:
            continue
        kind = f"{devices} {'unlike' if more.get('unlike') else 'like'}"
        lines.append([
            f"{shape}, {limited[1]['ops']:,}", kind, "no limit" if factor is None else f"{factor:g}",
            *("" if one is None else f"{one['took_s']:.0f}" for one in free),
            *("" if one is None else f"{max(one['took_s'] - LIMIT_S, 0.0):.2f}" for one in limited),
            *(shown(one) for one in (free[1], limited[1])),
        ])  # fmt: skip
    head = ["graph, ops", "devices", "memory", "before s", "s", "before late s", "late s", "step s", "with the limit"]
    return markdown(head, lines)


def main() -> int:
    """Makes rows and the table; the exit code."""
    chosen = arguments(
        __doc__,
        ops=(1 << 30, "largest number of ops"),
        limited="only with the limit",
        table="write the table of the page from the rows",
    )
    one_thread()
    budget.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore[assignment]
    run_planner("best", random_problem(0, 8))  # compiles
    for seed, (_, groups, _, _, more) in enumerate(CASES, 1):
        if not chosen.table and groups * (3 if more.get("training", True) else 1) <= 1.01 * chosen.ops:
            for limit_s in (LIMIT_S,) if chosen.limited else (LIMIT_S, None):
                add_row(ROWS, row(seed, limit_s))
    newest = {(one["code"], one["seed"], one["limit_s"]): one for one in read_rows(ROWS)}
    write_rows(ROWS, newest.values())
    write_between(PAGE, "large graphs", table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
