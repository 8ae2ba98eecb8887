"""The agent against the classical searches at equal simulator calls and equal wall time, all from the same floor.

    python -m benchmarks.agent --out rows.jsonl --processes 2 --agents default,seed1=runs/seed1,seed2=runs/seed2
    python -m benchmarks.agent --out rows.jsonl --finetune 20
    python -m benchmarks.agent --out rows.jsonl --report
    python -m benchmarks.agent --out tuned.jsonl --set validation --agents "" --methods annealing --tune annealing,cooling=0.1
    python -m benchmarks.agent --out curves.jsonl --set validation --curves seed0=runs/seed0,seed1=runs/seed1

Rows go to the file one by one and none is made twice; the tables and what they show come last, on stdout. Step times are
simulated. Wall-time rows are fair only on a quiet machine with one process a core.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.agent.jobs import adapting, chosen_methods, curve, matrix, measure, pick, split, tell
from benchmarks.agent.methods import RIVALS
from benchmarks.agent.report import curves, report
from benchmarks.agent.sets import SETS, load_set
from benchmarks.agent.store import Store
from rlplace.errors import RlplaceError


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, help="file of rows, *.jsonl; where it exists, go on with it")
    add("--set", default="test", choices=SETS)
    add("--agents", default="default", help="checkpoints, one a training seed: NAME or LABEL=FOLDER, with commas; empty: none")
    add("--ablation", action="append", default=[], metavar="LABEL=CHECKPOINT[,option=value...]",
        help="an agent beside the product, with options of Agent.place; untrained=1: weights never trained")  # fmt: skip
    add("--methods", default=",".join(RIVALS), help="classical searches, with commas; empty: none")
    add("--tune", action="append", default=[], metavar="METHOD,option=value[,...]",
        help="a classical search beside those, with options of its planner")  # fmt: skip
    add("--budgets", default="64,256,1024,4096,1s,5s", help="simulator calls, or seconds with an s")
    add("--seeds", type=int, default=3, help="runs of every classical search")
    add("--agent-seeds", type=int, default=1, help="runs of every checkpoint")
    add("--cases", default="", help="only cases whose name holds one of these texts")
    add("--processes", type=int, default=1, help="at most one a core")
    add(
        "--finetune",
        type=int,
        default=0,
        metavar="N",
        help="instead: adapt to one problem for 30 s, N instances, and annealing",
    )
    add("--curves", default="", metavar="LABEL=FOLDER,...", help="instead: every checkpoint of run folders, and annealing")
    add("--drop", default="", help="first remove these methods with their rows")
    add("--report", action="store_true", help="only the tables of what is there")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    options = arguments(words)
    make = curves if options.curves else report
    try:
        if options.report:
            print(make(Store.read(options.out)))
            return 0
        store = Store(settings(options.set), options.out)
        if options.drop:
            tell(f"{store.drop(options.drop.split(','))} rows removed")
        tell(f"loading the {options.set} cases")
        everything = load_set(options.set)
        cases = pick(everything, options.cases)
        if options.curves:
            asked = curve(cases, options.curves, options.budgets, options.seeds)
        elif options.finetune:
            asked = adapting(cases, options.agents, options.finetune, options.agent_seeds)
        else:
            methods = chosen_methods([*split(options.methods), *options.tune], options.agents, options.ablation)
            asked = matrix(cases, methods, options.budgets, options.seeds, options.agent_seeds)
        measure(store, asked, cases_in_set=len(everything), processes=options.processes)
        print(make(store))
    except RlplaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        tell(f"stopped; the same command goes on with {options.out}")
        return 130
    return 0


def settings(name: str) -> dict[str, Any]:
    """What all rows of a file have in common."""
    import numba
    import numpy
    import torch

    import rlplace

    versions = {module.__name__: module.__version__ for module in (rlplace, torch, numpy, numba)}
    return {"set": name, "python": platform.python_version(), **versions}


if __name__ == "__main__":
    sys.exit(main())
