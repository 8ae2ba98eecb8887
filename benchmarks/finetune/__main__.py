"""Fine-tuning on measured plans, on emulated clusters that differ from their description.

    sudo python -m benchmarks.finetune --out DIR                      all cells, resumable cell by cell; then the tables
    python -m benchmarks.finetune --out DIR --report                  only the tables of what is there

A cell is a cluster, a model and a seed. In it every method measures at most --plans plans: they share the first ones (the
un-tuned agent's answer and others that are good by the description), the calibration and the simulator calls of a proposal, and
differ in how they propose. `calibrated` is the control: the agent as shipped, in the calibrated simulator. All answers are then
timed in turn, in an order that changes from round to round; the tables are made of those times. A plan that one method has
measured is not measured again for another, but counts for both. Needs root; other programs on the machine disturb it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks.finetune.clusters import CLUSTERS, MODELS
from benchmarks.finetune.rank import read_rows
from benchmarks.finetune.report import report
from tools.hosts import emulated_hosts, launch

METHODS = ("finetuned", "calibrated", "annealing", "random", "bayes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of results")
    add("--clusters", nargs="+", default=list(CLUSTERS), choices=CLUSTERS)
    add("--models", nargs="+", default=list(MODELS), choices=MODELS)
    add("--methods", nargs="+", default=list(METHODS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--plans", type=int, default=60)
    add("--repeats", type=int, default=3, help="timed steps of a plan that stays in its race")
    add("--calls", type=int, default=1024, help="simulations of a proposal")
    add("--best-of", type=int, default=500, help="plans that the answers are compared with where --best-of-cells says so")
    add(
        "--best-of-cells", nargs="*", default=["slow_host/moe", "unlike_speeds/t5"], metavar="CLUSTER/MODEL", help="seed 0 only"
    )
    add("--agent", default="default")
    add("--report", action="store_true", help="only the tables")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        for seed in args.seeds:  # so that a part of the cells is a smaller experiment, not a part of the clusters
            for name in args.clusters:
                _run(name, seed, args)
    report(read_rows(args.out))


def _run(name: str, seed: int, args: argparse.Namespace) -> None:
    done = {row["model"] for row in read_rows(args.out) if (row["cluster"], row["seed"]) == (name, seed)}
    models = [model for model in args.models if model not in done]
    if not models:
        return
    settings = {
        "cluster": name,
        "seeds": [seed],
        "models": models,
        "out": str(args.out.resolve()),
        "best_of_models": [cell.partition("/")[2] for cell in args.best_of_cells if cell.startswith(f"{name}/") and seed == 0],
        **{key: getattr(args, key) for key in ("methods", "plans", "repeats", "calls", "agent", "best_of")},
    }
    with emulated_hosts(CLUSTERS[name].spec) as hosts:
        command = [sys.executable, "-m", "benchmarks.finetune.rank", json.dumps(settings)]
        with launch(hosts, command, sink=_pass_on) as job:
            job.wait()
            job.check()


def _pass_on(rank: int, host: int, stream: int, line: str) -> None:
    if rank == 0 and stream == 2:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
