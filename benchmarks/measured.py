"""Predicted against measured step time of many plans, on emulated hosts with real links.

    sudo python benchmarks/measured.py replay     four hosts; op times are slept, real tensors cross the shaped links
    sudo python benchmarks/measured.py compute    two hosts with a core each that compute for real
    ... [--models M ...] [--rates 1gbit 200mbit 50mbit] [--out DIR]

For every link speed the links are measured, the model is priced for that cluster, the plans of many planners are made (one
batch, micro-batches; all process the same samples), run, and compared: rank correlation, mean error, and how the
plan that is predicted to be fastest does. For `compute` the op times of this processor are measured and calibrated first.
Rows that --out holds already are not run again. Needs root; other programs on the machine disturb it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import rlplace
from rlplace.cost.timings import PlanTimings, rank_correlation
from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import run_planner
from rlplace.zoo import load_model
from tools.hosts import HostsSpec, emulated_hosts, launch, measure_cluster
from tools.hosts.spec import parse_rate

MODELS = {
    "replay": ("hf:gpt2,n_layer=4,n_embd=256,n_head=4,vocab_size=512",),
    "compute": ("hf:gpt2,n_layer=4,n_embd=256,n_head=4,vocab_size=512",),
}
RATES = ("1gbit", "200mbit", "50mbit")
SAMPLES, SEQ, GROUPS = 8, 64, 24
WHOLE = (
    "single",
    "round_robin",
    "balanced",
    "heft",
    "m_topo",
    "m_etf",
    "metis",
    "critical_path",
    "gpipe",
    "pardnn",
    "annealing",
)
SPLIT = (
    ("pipedream", "1f1b"),
    ("gpipe", "gpipe"),
    ("balanced", "list"),
    ("metis", "1f1b"),
    ("m_topo", "gpipe"),
    ("annealing", "list"),
)


def capture(model: str, batch: int) -> Any:
    loaded = load_model(model, batch=batch, seq=SEQ)
    source = {"model": model, "batch": batch, "seq": SEQ, "dtype": "fp32", "optimizer": "adam"}
    return rlplace.capture(loaded.module, loaded.example_inputs, loss=loaded.loss, source=source, name=model)


def plans_for(graphs: dict[int, Any], cluster: Any, costs: str | None, seed: int) -> tuple[dict[str, Any], list[Any]]:
    """Plans by name, no two the same, and their problems."""
    hosts = cluster.num_devices
    problems = {batch: rlplace.price(graph, cluster, groups=GROUPS, costs=costs) for batch, graph in graphs.items()}
    found: dict[str, Any] = {}
    seen = set()

    def keep(name: str, plan: Any) -> None:
        key = (plan.problem, plan.device_of_group.tobytes(), plan.microbatches, plan.schedule)
        if key not in seen:
            seen.add(key)
            found[name] = plan

    whole = problems[SAMPLES]
    for planner in WHOLE:
        keep(planner, run_planner(planner, whole, seed=seed, time_limit_s=1.0).plan)
    for number in range(4):
        random = np.random.default_rng(seed * 100 + number).integers(0, hosts, whole.num_groups)
        keep(f"random{number}", _plan(whole, random))
    for parts in (2, 4):
        problem = problems[SAMPLES // parts]
        for planner, schedule in SPLIT:
            try:
                plan = run_planner(planner, problem, seed=seed, time_limit_s=1.0, microbatches=parts, schedule=schedule).plan
            except (InfeasibleError, InputError):
                continue
            keep(f"{planner}-{parts}x-{schedule}", plan)
    return found, list(problems.values())


def _plan(problem: Any, devices: Any) -> Any:
    from rlplace.plan.plan import make_plan

    plan = make_plan(problem, devices, planner="random")
    return plan.with_predicted(rlplace.simulate(problem, plan).predicted(problem))


def measure(hosts: Any, folder: Path, replay: bool, repeats: int) -> PlanTimings:
    out = folder / "partial.timings.json"
    plans = sorted(str(path) for path in folder.glob("*.plan.json"))
    problems = sorted(str(path) for path in folder.glob("*.problem.json"))
    command = [sys.executable, "-m", "rlplace", "measure", "--plans", *plans, "--problem", *problems, "--threads", "1"]
    command += ["--out", str(out), "--repeats", str(repeats), *(["--replay"] if replay else [])]
    with launch(hosts, command, env={"OMP_NUM_THREADS": "1"}, sink=lambda *_: None) as job:
        job.wait(1200)
        job.check()
    out.rename(folder / "plans.timings.json")
    return PlanTimings.load(folder / "plans.timings.json")


def report(title: str, timings: PlanTimings) -> dict[str, Any]:
    rows = sorted(timings.plans, key=lambda plan: plan.median_s)
    print(f"\n{title}: {len(rows)} plans, {rows[0].mode}")
    for plan in rows:
        print(
            f"  {plan.name:24} {plan.engine:12} {plan.median_s * 1e3:9.2f} ms  {plan.predicted_s * 1e3:9.2f} predicted  "
            f"{100 * plan.error:+6.1f} %  spread {100 * plan.spread:.1f} %  set-up {plan.setup_s:.2f} s"
        )
    predicted, measured = [p.predicted_s for p in rows], [p.median_s for p in rows]
    pick = min(rows, key=lambda plan: plan.predicted_s)
    facts = {
        "title": title,
        "plans": len(rows),
        "correlation": rank_correlation(predicted, measured),
        "mean_error": float(np.mean([abs(plan.error) for plan in rows])),
        "pick": pick.name,
        "pick_over_fastest": pick.median_s / rows[0].median_s,
        "setup_s": float(np.median([plan.setup_s for plan in rows])),
    }
    print(
        f"  rank correlation {facts['correlation']:.3f}, mean error {100 * facts['mean_error']:.1f} %, "
        f"pick {pick.name} {100 * (facts['pick_over_fastest'] - 1):.1f} % above the fastest, set-up {facts['setup_s']:.2f} s"
    )
    return facts


def calibrated(model: str, folder: Path) -> str:
    """A cost file for a host: the ops of the model at every micro-batch size, timed on both cores at the same time.

    The cores share caches and memory, so what one takes while the other computes is what it takes in a plan.
    """
    files = []
    for batch in (SAMPLES, SAMPLES // 2, SAMPLES // 4):
        path = folder / f"ops{batch}.measure.json"
        if not path.exists():
            command = [sys.executable, "-m", "rlplace", "measure", model, "--ops", "--step", "--threads", "1"]
            command += ["--batch", str(batch), "--seq", str(SEQ), "--out"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            jobs = [
                subprocess.Popen(
                    ["taskset", "-c", str(core), *command, str(path.with_suffix(f".core{core}.json"))],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                )
                for core in (0, 1)
            ]
            if any([job.wait() for job in jobs]):
                raise SystemExit("measured: timing the ops failed")
            path.with_suffix(".core0.json").rename(path)
        files.append(str(path))
    out = folder / "host.cost.json"
    command = [sys.executable, "-m", "rlplace", "calibrate", *files, "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("replay", "compute"))
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("measured"))
    args = parser.parse_args()
    hosts_count, rows = (4, []) if args.mode == "replay" else (2, [])
    for model in args.models or MODELS[args.mode]:
        graphs = {batch: capture(model, batch) for batch in (8, 4, 2, 1)}
        base = args.out / args.mode / model.replace(":", "_").replace(",", "_").replace("=", "")
        base.mkdir(parents=True, exist_ok=True)
        costs = calibrated(model, base) if args.mode == "compute" else None
        for rate in args.rates:
            folder = base / rate
            folder.mkdir(exist_ok=True)
            if not (folder / "plans.timings.json").exists():
                cores = tuple((core,) for core in range(hosts_count)) if args.mode == "compute" else None
                spec = HostsSpec(hosts_count, parse_rate(rate), cpus=cores)
                with emulated_hosts(spec) as hosts:
                    cluster = measure_cluster(hosts, repeats=9, time_limit_s=20)
                    plans, problems = plans_for(graphs, cluster, costs, args.seed)
                    for number, problem in enumerate(problems):
                        problem.save(folder / f"{number}.problem.json")
                    for name, plan in plans.items():
                        plan.save(folder / f"{name}.plan.json")
                    measure(hosts, folder, args.mode == "replay", args.repeats)
            rows.append(report(f"{model} at {rate}", PlanTimings.load(folder / "plans.timings.json")))
    print("\n| cluster | plans | rank correlation | mean error | pick above the fastest | set-up of a plan |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {args.mode}, {row['title']} | {row['plans']} | {row['correlation']:.3f} | {100 * row['mean_error']:.1f} % | "
            f"{100 * (row['pick_over_fastest'] - 1):.1f} % | {row['setup_s']:.2f} s |"
        )


if __name__ == "__main__":
    main()
