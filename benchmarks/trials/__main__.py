"""Every model of a collection through rlplace as a new user would take it, and whether it trains like the model itself.

    python -m benchmarks.trials                                  all models and axes, as a table
    python -m benchmarks.trials --few                            the models and axes of the tests
    python -m benchmarks.trials --only 'clip*' --axes replicas   some
    python -m benchmarks.trials --models mine.py                 the functions of a file or folder of your own

Planned by `rlplace place`, run on gloo processes by a loop of three SGD steps, compared with the plain model on whole batches:
loss, every gradient, parameters and buffers. A row is *equal*; *noted*, where the plan's notes say that it computes something
else, which equals a loop over the parts; *random*, where the model draws in its forward and running is all that is tried;
*refused*, with the reason (*late* by `distribute`, although it was planned); or WRONG, which a crash and a hang are, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.groups import run_jobs
from benchmarks.trials.collection import OWN, Trial, call, trials
from benchmarks.trials.step import MOST, Case, compare, equal, missing

BATCH, CALLS, LIMIT_S = 8, 40, 60.0
COPIES = "replicate=2 shard=1 pipeline=1 tensor=1"
AXES: dict[str, tuple[int, tuple[str, ...]]] = {
    "default": (2, ()),
    "replicas": (2, ("--space", f"{COPIES} microbatches=1")),
    "gather": (2, ("--space", f"{COPIES} microbatches=1", "--couple", "gather")),
    "buffers": (2, ("--space", f"{COPIES} microbatches=1", "--buffers", "replica")),
    "micro": (2, ("--space", f"{COPIES} microbatches=2")),
    "recompute": (2, ("--space", f"{COPIES} recompute=full,selective")),
    "shares1": (2, ("--space", "replicate=1 shard=2 pipeline=1 tensor=1 sharding=1")),
    "shares3": (2, ("--space", "replicate=1 shard=2 pipeline=1 tensor=1 sharding=3")),
    "pipeline": (2, ("--space", "replicate=1 shard=1 pipeline=2 tensor=1")),
    "tensor": (2, ("--space", "replicate=1 shard=1 pipeline=1 tensor=2")),
    "placement": (2, ("--space", "placement", "--planner", "round_robin")),
    "copies x stages": (4, ("--space", "replicate=2 shard=1 pipeline=2 tensor=1")),
    "shares x tensor": (4, ("--space", "replicate=1 shard=2 pipeline=1 tensor=2")),
}
"""By name: processes, and options of `rlplace place`."""

ADVISED = {"gather": "--couple gather", "buffers": "--buffers replica"}
"""Axes that are tried only where an answer before them advised their option."""

EVERY = 4
"""One in so many models is also run on four processes."""

FEW_AXES = ("default", "replicas", "shares3", "pipeline", "placement")
FEW = (
    "pre_norm", "tied_embeddings", "rope_grouped_queries", "lora", "resnet_without_norms", "resnet_batch_norm", "gru",
    "experts_by_dense_weights", "experts_by_if", "recommender", "codebook_in_buffers", "gradient_penalty", "clip_like",
    "masked_mean", "weighted_classes", "forward_hook_scales", "hook_of_a_parameter", "spectral_norm", "loose_parameters",
    "nested_output",
)  # fmt: skip
"""Models of the tests."""


@dataclass(frozen=True)
class Row:
    """The result of a model on an axis; `worst` are the largest differences from what it is compared with."""

    model: str
    axis: str
    status: str
    reason: str = ""
    worst: dict[str, float] | None = None
    plan: str = ""


@dataclass(frozen=True)
class Planning:
    """A plan to ask for."""

    trial: Trial
    axis: str
    path: str


def _place(job: Planning) -> dict[str, Any]:
    """Asks the command line for a plan."""
    from rlplace.cli import models
    from rlplace.cli.main import main

    vars(models)["cached"] = _remembered
    processes, options = AXES[job.axis]
    words = ["place", job.trial.spec, "--cluster", f"cpu:{processes}", *(["--batch", str(BATCH)] if job.trial.sized else [])]
    if "--planner" not in options:
        words += ["--calls", str(CALLS)]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([*words, *options, "--out", job.path])
        except SystemExit as error:
            code = int(error.code or 0)
    line = next((line for line in reversed(said.getvalue().splitlines()) if line.startswith("rlplace: ")), "")
    return {"code": code, "line": line.removeprefix("rlplace: ")}


_MEMORY: dict[str, bytes] = {}


def _remembered(what: str, model: str, asked: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Keeps captures of a model between its axes, as `rlplace.cli.capture_cache` does for `hf:` models between commands."""
    key = repr((what, model, sorted(asked.items())))
    if key not in _MEMORY:
        made = make()
        try:
            _MEMORY[key] = pickle.dumps(made)
        except Exception:  # what cannot be kept is made again
            return made
    return pickle.loads(_MEMORY[key])


def _draws(trial: Trial) -> dict[str, Any]:
    """Says whether the loss of the model depends on more than its weights and inputs."""
    import torch

    losses = []
    for seed in (1, 2):
        model, inputs, loss = trial.make(0, BATCH)
        torch.manual_seed(seed)
        losses.append(call(model, inputs, loss).item())
    return {"random": abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0])}


def _notes(path: str) -> str:
    """Says what a plan says of itself; nothing where there is none."""
    return str(json.loads(Path(path).read_text()).get("predicted", {}).get("extra")) if Path(path).exists() else ""


def _strategy(path: str) -> dict[str, Any]:
    """Returns the strategy of a plan, as its file has it."""
    return json.loads(Path(path).read_text())["strategy"]


def _devices(path: str) -> int:
    """Counts how many processes a plan needs."""
    return len({device for stage in _strategy(path)["stages"] for device in stage["devices"]})


def _words(path: str) -> str:
    """Says what a plan chose, in short."""
    data = _strategy(path)
    stages = data["stages"]
    mesh = " ".join(f"{axis}={n}" for axis, n in stages[0].get("mesh", {}).items() if n > 1)
    level = stages[0].get("sharding", 0)
    again = sorted({how for stage in stages for how in stage.get("recompute", {}).values()})
    parts = [
        f"{len(stages)} stages {data['schedule']}" if len(stages) > 1 else "",
        mesh,
        f"sharding={level}" if level else "",
        *again,
    ]
    return ", ".join(filter(None, [*parts, f"{data['microbatches'][0]} x {data['microbatch'][0]}"]))


def tried(trial: Trial, axes: Sequence[str], limit_s: float) -> list[Row]:
    """Returns the rows of one model."""
    rows: dict[str, Row] = {}
    (looked,) = next(iter(run_jobs(_draws, [trial], 1, limit_s, "")))
    if "error" in looked:
        return [Row(trial.name, axis, "broken", f"the plain model: {looked['error']}: {looked['line']}") for axis in axes]
    with tempfile.TemporaryDirectory() as folder:
        asked = [Planning(trial, axis, f"{folder}/{n}.plan.json") for n, axis in enumerate(axes)]
        cases: dict[int, list[tuple[Planning, Case]]] = {}
        advice = ""
        for job, (found,) in zip(asked, run_jobs(_place, asked, 1, 2 * limit_s, ""), strict=True):
            if job.axis in ADVISED and ADVISED[job.axis] not in advice:
                continue
            advice += found.get("line", "") + _notes(job.path)
            if "error" in found or found["line"].startswith("unexpected "):
                line = f"{found['error']}: {found['line']}" if "error" in found else found["line"]
                rows[job.axis] = Row(trial.name, job.axis, "WRONG", f"place: {line}")
            elif found["code"]:
                rows[job.axis] = Row(trial.name, job.axis, "refused", found["line"])
            else:
                samples = _strategy(job.path)["batch"]
                cases.setdefault(_devices(job.path), []).append((job, Case(trial, job.path, samples, looked["random"])))
        for processes, planned in cases.items():
            results = run_jobs(compare, [case for _, case in planned], processes, limit_s)
            for (job, case), results_of in zip(planned, results, strict=True):
                rows[job.axis] = _judged(trial, job, case, results_of)
    return [rows[axis] for axis in axes if axis in rows]


def _judged(trial: Trial, job: Planning, case: Case, results: list[dict[str, Any]]) -> Row:
    """Returns one row from what the processes found."""
    words, failures = _words(job.path), [one for one in results if "error" in one]
    if failures:
        failed = min(failures, key=lambda one: "gloo" in one["line"])  # others lost a process that failed
        refused = all(one.get("refused") for one in results)
        reason = failed["line"] if refused else f"{failed['error']}: {failed['line']}"
        return Row(trial.name, job.axis, "late" if refused else "WRONG", reason, plan=words)
    lost = missing(trial, BATCH, {name for one in results for name in one["held"]})
    if lost:
        return Row(trial.name, job.axis, "WRONG", f"no process holds {', '.join(lost)}", plan=words)
    if case.random:
        return Row(trial.name, job.axis, "random", "draws in its forward; it runs", plan=words)
    worst = [
        {name: max(one["figures"][at][name] for one in results) for name in MOST} for at in range(len(results[0]["figures"]))
    ]
    notes = "; ".join(results[0]["notes"])
    for status, figures in zip(("equal", "noted"), worst, strict=False):
        if equal(figures, trial.tolerance):
            return Row(trial.name, job.axis, status, notes if status == "noted" else "", _short(figures), words)
    off = worst[-1]
    over = [f"{name} {off[name][0]:.1e} off ({off[name][1]})" for name in MOST if off[name][0] > MOST[name] * trial.tolerance]
    return Row(trial.name, job.axis, "WRONG", "; ".join([*over, *([f"noted: {notes}"] if notes else [])]), _short(off), words)


def _short(figures: Mapping[str, tuple[float, str]]) -> dict[str, float]:
    return {name: float(f"{value:.1e}") for name, (value, _) in figures.items()}


def _warm() -> None:
    """Imports what every process would import for itself."""
    import importlib

    for name in (
        "torch.export._trace", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch._inductor.fx_passes",
        "torch._inductor.sizevars", "numba", "scipy.optimize", "rlplace.cli.main", "rlplace.api",
        "rlplace.strategy.search.branches",
        "rlplace.runtime.job.distribute", "rlplace.runtime.strategy.run", "rlplace.runtime.strategy.facts",
        "rlplace.strategy.search.plan", "rlplace.placement.round_robin", "rlplace.placement.common.repair",
        "rlplace.explanation.compare.rows", "rlplace.runtime.placement.placed_model",
        "rlplace.model.zoo.load", "rlplace.agents.compile_ahead", "rlplace.simulator.loop",
    ):  # fmt: skip
        importlib.import_module(name)


def rows_of(chosen: Sequence[Trial], axes: Sequence[str], lanes: int = 1, limit_s: float = LIMIT_S) -> Iterator[Row]:
    """Yields the rows of all models, as they come.

    Args:
        chosen: Models.
        axes: Names of axes.
        lanes: Models at once.
        limit_s: Time for one case.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    _warm()
    with ProcessPoolExecutor(lanes, mp_context=get_context("fork")) as pool:
        given = [[axis for axis in axes if AXES[axis][0] < 4 or n % EVERY == 0] for n in range(len(chosen))]
        for rows in pool.map(tried, chosen, given, [limit_s] * len(chosen)):
            yield from rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=Path, default=[OWN], help="files and folders of functions of models")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names of models")
    parser.add_argument("--axes", nargs="+", choices=tuple(AXES), default=list(AXES))
    parser.add_argument("--few", action="store_true", help="the models and axes of the tests")
    parser.add_argument("--lanes", type=int, default=1, help="models at once")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time for one case, after which it hangs")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    options = parser.parse_args()
    chosen = [trial for trial in trials(options.models) if any(fnmatch(trial.name, pattern) for pattern in options.only)]
    axes = [axis for axis in options.axes if not options.few or axis in FEW_AXES]
    if options.few:
        chosen = [trial for trial in chosen if trial.name in FEW]
    began, counts = time.monotonic(), dict[str, int]()
    for row in rows_of(chosen, axes, options.lanes, options.limit_s):
        counts[row.status] = counts.get(row.status, 0) + 1
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            print(f"{row.model:28} {row.axis:16} {row.status:8} {row.plan:34} {row.reason[:180]}", flush=True)
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(f"{len(chosen)} models: {told}; {time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(any(counts.get(status) for status in ("WRONG", "broken")))


if __name__ == "__main__":
    sys.exit(main())
