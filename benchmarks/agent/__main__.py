"""The agent against the classical searches at equal simulator calls and equal wall time, all from the same floor.

    python -m benchmarks.agent --out rows.jsonl --processes 2 --agents default,seed1=runs/seed1,seed2=runs/seed2
    python -m benchmarks.agent --out rows.jsonl --report
    python -m benchmarks.agent --out tuned.jsonl --set validation --agents "" --methods annealing --tune annealing,cooling=0.1

Rows go to the file one by one and none is made twice; the tables come last, on stdout. Step times are simulated. Wall-time rows
are fair only on a quiet machine with one process a core.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.agent.jobs import SETS, matrix, measure, pick, split, tell
from benchmarks.agent.methods import RIVALS, chosen_methods
from benchmarks.agent.store import Store
from benchmarks.agent.tables import report
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
    add("--report", action="store_true", help="only the tables of what is there")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    options = arguments(words)
    try:
        if options.report:
            print(report(Store({}, options.out, report=True)))
            return 0
        store = Store(settings(options.set), options.out)
        tell(f"loading the {options.set} cases")
        cases = pick(SETS[options.set](), options.cases)
        methods = chosen_methods([*split(options.methods), *options.tune], split(options.agents), options.ablation)
        measure(store, matrix(cases, methods, options.budgets, options.seeds, options.agent_seeds), options.processes)
        print(report(store))
    except RlplaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        tell(f"stopped; the same command goes on with {options.out}")
        return 130
    return 0


def settings(name: str) -> dict[str, Any]:
    """Says what all rows of a file have in common."""
    import numba
    import numpy
    import torch

    import rlplace

    versions = {module.__name__: module.__version__ for module in (rlplace, torch, numpy, numba)}
    return {"set": name, "python": platform.python_version(), **versions}


if __name__ == "__main__":
    sys.exit(main())
