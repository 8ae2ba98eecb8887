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

import contextlib
import io
import json
import os
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.groups import run_jobs
from benchmarks.harness import arguments
from benchmarks.trials.collection import OWN, Trial, call, trials
from benchmarks.trials.step import MOST, Case, compare, equal, missing
from rlplace.placement import get_planner

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

FEW_AXES = ("default", "shares3", "pipeline", "placement")
FEW = (
    "lora", "resnet_batch_norm", "experts_by_if", "codebook_in_buffers", "clip_like",
)  # fmt: skip
"""Models of the tests."""


class Row(NamedTuple):
    """The result of a model on an axis; `worst` are the largest differences from what it is compared with."""

    model: str
    axis: str
    status: str
    reason: str = ""
    worst: dict[str, float] | None = None
    plan: str = ""


def _place(job: Case) -> dict[str, Any]:
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
            code = main([*words, *options, "--out", job.plan])
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


def _plan(path: str) -> dict[str, Any]:
    """Reads a plan; empty where there is none."""
    return json.loads(Path(path).read_text()) if Path(path).exists() else {}


def _words(plan: dict[str, Any]) -> str:
    """Says in short what a plan chose."""
    data = plan["strategy"]
    stages = data["stages"]
    mesh = " ".join(f"{axis}={n}" for axis, n in stages[0].get("mesh", {}).items() if n > 1)
    level = stages[0].get("sharding", 0)
    again = sorted({how for stage in stages for how in stage.get("recompute", {}).values()})
    shape = f"{len(stages)} stages {data['schedule']}" if len(stages) > 1 else ""
    parts = [shape, mesh, f"sharding={level}" if level else "", *again, f"{data['microbatches'][0]} x {data['microbatch'][0]}"]
    return ", ".join(filter(None, parts))


def tried(trial: Trial, axes: Sequence[str], limit_s: float) -> list[Row]:
    """Makes the rows of one model."""
    rows: dict[str, Row] = {}
    ((looked,),) = run_jobs(_draws, [trial], 1, limit_s, "")
    if "error" in looked:
        return [Row(trial.name, axis, "broken", f"the plain model: {looked['error']}: {looked['line']}") for axis in axes]
    with tempfile.TemporaryDirectory() as folder:
        asked = [Case(trial, axis, f"{folder}/{n}.plan.json", random=looked["random"]) for n, axis in enumerate(axes)]
        cases: dict[int, list[Case]] = {}
        advice = ""
        for case, (found,) in zip(asked, run_jobs(_place, asked, 1, 2 * limit_s, ""), strict=True):
            if case.axis in ADVISED and ADVISED[case.axis] not in advice:
                continue
            plan = _plan(case.plan)
            advice += found.get("line", "") + str(plan.get("predicted", {}).get("extra"))
            if "error" in found or found["line"].startswith("unexpected "):
                line = f"{found['error']}: {found['line']}" if "error" in found else found["line"]
                rows[case.axis] = Row(trial.name, case.axis, "WRONG", f"place: {line}")
            elif found["code"]:
                rows[case.axis] = Row(trial.name, case.axis, "refused", found["line"])
            else:
                devices = {device for stage in plan["strategy"]["stages"] for device in stage["devices"]}
                cases.setdefault(len(devices), []).append(case._replace(batch=plan["strategy"]["batch"]))
        for processes, planned in cases.items():
            for case, results in zip(planned, run_jobs(compare, planned, processes, limit_s), strict=True):
                rows[case.axis] = judged(case, results)
    return [rows[axis] for axis in axes if axis in rows]


def judged(case: Case, results: list[dict[str, Any]]) -> Row:
    """Makes one row of what the processes found."""
    trial, failures = case.trial, [one for one in results if "error" in one]
    row = Row(trial.name, case.axis, "WRONG", plan=_words(_plan(case.plan)))
    if failures:
        failed = min(failures, key=lambda one: "gloo" in one["line"])  # others lost a process that failed
        if all(one.get("refused") for one in results):
            return row._replace(status="late", reason=failed["line"])
        return row._replace(reason=f"{failed['error']}: {failed['line']}")
    if lost := missing(trial, BATCH, {name for one in results for name in one["held"]}):
        return row._replace(reason=f"no process holds {', '.join(lost)}")
    if case.random:
        return row._replace(status="random", reason="draws in its forward; it runs")
    found, notes = [one["figures"] for one in results], "; ".join(results[0]["notes"])
    worst = [{name: max(figures[at][name] for figures in found) for name in MOST} for at in range(len(found[0]))]
    for status, figures in zip(("equal", "noted"), worst, strict=False):
        if equal(figures, trial.tolerance):
            return row._replace(status=status, reason=notes if status == "noted" else "", worst=_short(figures))
    off = worst[-1]
    over = [f"{name} {off[name][0]:.1e} off ({off[name][1]})" for name in MOST if off[name][0] > MOST[name] * trial.tolerance]
    return row._replace(reason="; ".join([*over, *([f"noted: {notes}"] if notes else [])]), worst=_short(off))


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
        "rlplace.strategy.search.plan", "rlplace.placement.common.repair",
        "rlplace.explanation.compare.rows", "rlplace.runtime.placement.placed_model",
        "rlplace.model.zoo.load", "rlplace.agents.compile_ahead", "rlplace.simulator.loop",
    ):  # fmt: skip
        importlib.import_module(name)
    get_planner("round_robin")


def rows_of(chosen: Sequence[Trial], axes: Sequence[str], lanes: int = 1, limit_s: float = LIMIT_S) -> Iterator[Row]:
    """Yields the rows of models on axes as they come, so many models at once, with a limit of time for one case."""
    os.environ["OMP_NUM_THREADS"] = "1"
    _warm()
    with ProcessPoolExecutor(lanes, mp_context=get_context("fork")) as pool:
        given = [[axis for axis in axes if AXES[axis][0] < 4 or n % EVERY == 0] for n in range(len(chosen))]
        for rows in pool.map(tried, chosen, given, [limit_s] * len(chosen)):
            yield from rows


def main() -> int:
    """Tries the models; the exit code is 1 where a row is WRONG or a model is broken."""
    options = arguments(
        __doc__,
        models=((OWN,), "files and folders of functions of models"),
        only=(("*",), "patterns of names of models"),
        axes=(tuple(AXES), "ways to run", AXES),
        few="the models and axes of the tests",
        lanes=(1, "models at once"),
        limit_s=(LIMIT_S, "time for one case, after which it hangs"),
        json="print rows as JSON lines",
    )
    chosen = [trial for trial in trials(options.models) if any(fnmatch(trial.name, pattern) for pattern in options.only)]
    chosen = [trial for trial in chosen if not options.few or trial.name in FEW]
    axes = [axis for axis in options.axes if not options.few or axis in FEW_AXES]
    began, counts = time.monotonic(), Counter[str]()
    for row in rows_of(chosen, axes, options.lanes, options.limit_s):
        counts[row.status] += 1
        text = f"{row.model:28} {row.axis:16} {row.status:8} {row.plan:34} {row.reason[:180]}"
        print(json.dumps(row._asdict()) if options.json else text, flush=True)
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(f"{len(chosen)} models: {told}; {time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(bool(counts["WRONG"] or counts["broken"]))


if __name__ == "__main__":
    sys.exit(main())
