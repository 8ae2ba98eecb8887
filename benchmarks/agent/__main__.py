"""The agent against the classical searches at equal simulator calls and equal wall time, all from the same floor.

    python -m benchmarks.agent --out rows.jsonl [--agents default,seed1=runs/seed1] [--methods annealing,brkga]
    python -m benchmarks.agent --out rows.jsonl --report

Rows go to the file one by one and are never made twice; the tables come last. Step times are of the executor `list` or the
schedule of the case, simulated; wall-time rows are fair only on a quiet machine with one process a core.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.agent.measure import Job, workers
from benchmarks.agent.methods import RIVALS, learned, rival
from benchmarks.agent.records import ABLATION, AGENT, Budget, CaseInfo, Method, Row
from benchmarks.agent.sets import SETS, describe, load_set
from benchmarks.agent.store import Store
from benchmarks.agent.tables import family_table, main_tables, stage_table
from rlplace.errors import InputError, RlplaceError


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="file of rows, *.jsonl; exists: go on with it")
    parser.add_argument("--set", default="test", choices=SETS)
    parser.add_argument(
        "--agents", default="default", help="checkpoints, one a training seed: NAME or LABEL=FOLDER,...; empty: none"
    )
    parser.add_argument(
        "--ablation", action="append", default=[], metavar="LABEL=CHECKPOINT[,option=value...]",
        help="an agent that is not the product, with options of Agent.place; untrained=1: weights never trained",
    )  # fmt: skip
    parser.add_argument("--methods", default=",".join(RIVALS), help="classical searches; empty: none")
    parser.add_argument("--budgets", default="64,256,1024,4096,1s,5s", help="simulator calls, or seconds with an s")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every classical search")
    parser.add_argument("--agent-seeds", type=int, default=1, help="runs of every training seed and ablation")
    parser.add_argument("--cases", default="", help="only cases whose name holds one of these texts")
    parser.add_argument(
        "--shard", default="0/1", metavar="K/N", help="every N-th case from the K-th on; give each its own --out"
    )
    parser.add_argument("--processes", type=int, default=1, help="one a core at most")
    parser.add_argument("--drop", default="", help="first remove these methods and their rows")
    parser.add_argument("--report", action="store_true", help="only tables of what is there")
    parser.add_argument("--merge", nargs="*", default=[], help="files of other shards to take rows from")
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    try:
        if options.report:
            print(report(Store.read(options.out)))
            return 0
        store = Store(settings(options.set), options.out)
        if options.drop:
            tell(f"{store.drop(options.drop.split(','))} rows removed")
        for path in options.merge:
            store.merge(Store.read(path))
        measure(store, options)
        print(report(store))
    except RlplaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        tell(f"stopped; the same command goes on with {options.out}")
        return 130
    return 0


def settings(name: str) -> dict[str, Any]:
    """What rows of one file have in common."""
    import numba
    import numpy
    import torch

    import rlplace

    versions = {"rlplace": rlplace.__version__, "python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (torch, numpy, numba)}
    return {"set": name, **versions}


def measure(store: Store, options: argparse.Namespace) -> None:
    """Makes the rows that are asked for and not there."""
    first, count = shard(options.shard)
    wanted = [text for text in options.cases.split(",") if text]
    tell(f"loading the {options.set} cases")
    cases = [case for case in load_set(options.set) if not wanted or any(text in case.name for text in wanted)][first::count]
    if not cases:
        raise InputError(f"--cases {options.cases}: no case of the set {options.set} has such a name")
    methods = chosen_methods(options)
    budgets = [Budget.parse(text) for text in options.budgets.split(",") if text]
    for case in cases:
        store.check_case(case.name, case.problem.fingerprint)
    for method in methods:
        store.add_method(method)
    cores = len(os.sched_getaffinity(0))
    if not 1 <= options.processes <= cores:
        raise InputError(f"--processes {options.processes}: this machine has {cores} cores for it, give 1 to {cores}")
    load = list(os.getloadavg())
    store.add_run(
        {
            "processes": options.processes,
            "cores": cores,
            "load": load,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
    )
    with workers(cases, options.processes) as run:
        unknown = [Job(describe(case)) for case in cases if case.name not in store.cases]
        for number, info in enumerate(run(unknown), start=1):
            assert isinstance(info, CaseInfo)
            store.add_case(info)
            step = "infeasible" if info.floor_s is None else f"{1e3 * info.floor_s:.3f} ms"
            tell(f"floor {number}/{len(unknown)} {info.name}: {step}, {info.floor_seconds:.2f} s")
        jobs = [
            Job(store.cases[case.name], method, budget, seed)
            for budget in budgets
            for case in cases
            for method in methods
            for seed in range(options.agent_seeds if method.checkpoint else options.seeds)
        ]
        jobs = [job for job in jobs if not store.done(job.key)]
        begin = told = time.monotonic()
        for number, row in enumerate(run(jobs), start=1):
            assert isinstance(row, Row)
            store.add_row(row)
            if row.violation is not None and store.cases[row.case].floor_s is not None:
                tell(f"{row.method} on {row.case} with {row.budget}: {row.violation}")
            now = time.monotonic()
            if now - told > 10 or number == len(jobs):
                told = now
                tell(f"row {number}/{len(jobs)}, {row.budget}, {now - begin:.0f} s")


def chosen_methods(options: argparse.Namespace) -> list[Method]:
    """The methods that are asked for; labels are unique."""
    methods = [rival(name) for name in options.methods.split(",") if name]
    methods += [learned(text, AGENT) for text in options.agents.split(",") if text]
    methods += [learned(text, ABLATION) for text in options.ablation]
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two methods are called {name}; give one another label, LABEL=CHECKPOINT")
    return methods


def shard(text: str) -> tuple[int, int]:
    """Reads ``K/N``."""
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise InputError(f"--shard {text}: expected K/N with K from 0 to N-1")
    return int(first), int(count)


def report(store: Store) -> str:
    """All tables as markdown."""
    return "\n".join([*main_tables(store), family_table(store), stage_table(store)])


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
