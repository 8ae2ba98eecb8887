"""The agent against the classical searches at equal simulator calls and equal wall time, all from the same floor.

    python -m benchmarks.agent --out rows.jsonl --processes 2 --agents default,seed1=runs/seed1,seed2=runs/seed2
    python -m benchmarks.agent --out rows.jsonl --report
    python -m benchmarks.agent --out tuned.jsonl --set validation --agents "" --methods annealing --tune annealing,cooling=0.1

Rows go to the file one by one and none is made twice; the tables come last, on stdout. Step times are simulated. Wall-time rows
are fair only on a quiet machine with one process a core.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.agent.measure import SETS, matrix, measure, pick, split, tell
from benchmarks.agent.methods import RIVALS, chosen_methods
from benchmarks.agent.records import Store
from benchmarks.agent.tables import report
from benchmarks.harness import arguments
from rlplace.errors import RlplaceError


def main(words: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    options = arguments(
        __doc__,
        words=words,
        out=(Path("rows.jsonl"), "file of rows; where it exists, go on with it"),
        set=("test", "cases", SETS),
        agents=("default", "checkpoints, one a training seed: NAME or LABEL=FOLDER, with commas; empty: none"),
        ablation=((), "agents beside the product, LABEL=CHECKPOINT[,option=value...]; untrained=1: weights never trained"),
        methods=(",".join(RIVALS), "classical searches, with commas; empty: none"),
        tune=((), "classical searches beside those, METHOD,option=value[,...] with options of its planner"),
        budgets=("64,256,1024,4096,1s,5s", "simulator calls, or seconds with an s"),
        seeds=(3, "runs of every classical search"),
        agent_seeds=(1, "runs of every checkpoint"),
        cases=("", "only cases whose name holds one of these texts"),
        processes=(1, "at most one a core"),
        report="only the tables of what is there",
    )
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
