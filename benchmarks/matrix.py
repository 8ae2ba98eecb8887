"""Every registered planner on models x clusters; writes the tables between the matrix markers of benchmarks/RESULTS.md.

    python -m benchmarks.matrix --generated      planners on 15 generated problems of 200 groups, shown as by `rlplace compare`
    python -m benchmarks.matrix [--out DIR] [--only TEXT] [--planners a b] [--calls 1024] [--time-limit 3] [--write]

Each model is captured once and priced for every cluster. Every row is on disk (step.jsonl) as soon as it is there; started
again with the same options, the benchmark goes on where it stopped. Step times are simulated by the executor `list`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, arguments, markdown, write_between
from rlplace.cli.compare import print_comparison
from rlplace.cluster.parse import parse
from rlplace.cost.price import price
from rlplace.explanation.compare import Case, Comparison, Settings, Store, compare, gather
from rlplace.explanation.compare.records import TASKS, VIEWS
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.zoo import load_model
from rlplace.placement import ONE_SHOT, PLANNERS
from rlplace.placement.ask import OK
from rlplace.problem.generate import random_problem
from rlplace.stats import geometric_mean

MODELS = (
    ("hf:gpt2", 64, 512), ("hf:bert", 96, 512), ("hf:t5", 96, 512), ("hf:llama,num_hidden_layers=6", 8, 1024),
    ("hf:mixtral,num_hidden_layers=1", 16, 512), ("hf:whisper", 128, 448), ("hf:mamba", 256, 64), ("hf:vit", 256, 64),
    ("hf:swin", 256, 64), ("hf:resnet", 512, 64), ("zoo:inception", 512, 64), ("zoo:nasnet", 1024, 64), ("zoo:unet", 256, 64),
    ("zoo:lstm", 256, 256), ("zoo:transformer", 192, 256), ("zoo:dlrm", 65536, 64),
)  # fmt: skip
"""MODEL, batch, sequence length; fp32 and Adam."""

CLUSTERS = ("a100-80g:4", "v100:4,pcie", "a100-40g:2x4,eth=25g", "l4:2+t4:2")
"""NVLink; PCIe; two hosts over Ethernet; unlike kinds with little memory."""


def cases_of(groups: int, only: tuple[str, ...]) -> Iterator[Case]:
    """Yields every model on every cluster; a model is captured once."""
    for model, batch, seq in MODELS:

        @cache
        def captured(model: str = model, batch: int = batch, seq: int = seq) -> OpGraph:
            loaded = load_model(model, batch=batch, seq=seq)
            return capture(loaded.module, loaded.example_inputs, loss=loaded.loss, name=loaded.name)

        for cluster in CLUSTERS if not only or any(text in model for text in only) else ():
            yield Case(f"{model}, {batch}", cluster, lambda c=cluster, graph=captured: price(graph(), parse(c), groups=groups))


def generated(groups: int) -> list[Case]:
    """Makes problems whose shapes, links, memory and speeds pull in different directions."""
    settings: list[dict[str, Any]] = [
        {"shape": shape, **more}
        for shape in ("layered", "branchy", "chain")
        for more in (
            {"num_devices": 2, "memory_factor": 1.15},
            {"num_devices": 4, "memory_factor": 1.3},
            {"num_devices": 4, "comm_ratio": 3.0, "memory_factor": 1.6},
            {"num_devices": 4, "unlike": True},
            {"num_devices": 8, "hosts": 2, "memory_factor": 2.0},
        )
    ]
    problems = [random_problem(index, groups, **setting) for index, setting in enumerate(settings)]
    return [Case(problem.name, "", lambda same=problem: same) for problem in problems]


def report(found: Comparison, options: argparse.Namespace) -> str:
    """Makes the block for benchmarks/RESULTS.md."""
    models = len(dict.fromkeys(info.model for info in found.problems))
    whole = sum(info.view == TASKS for info in found.problems)
    crowded = sum(row.planner == "single" and row.status != OK and row.view == TASKS for row in found.rows)
    minutes = sum(row.seconds * row.seeds for row in found.rows) / 60
    lines = [
        "## Planners on models and clusters",
        "",
        f"`python -m benchmarks.matrix --calls {options.calls} --time-limit {options.time_limit:g} --groups {options.groups} "
        f"--seeds {options.seeds} --write`: {models} models on",
        f"{len(CLUSTERS)} clusters, fp32 and Adam, at most {options.groups} groups; {crowded} of the {whole} problems do not "
        f"fit on one device. Searches have {options.calls} simulator calls after the floor, everybody else",
        f"{options.time_limit:g} s; random planners {options.seeds} seeds. {minutes:.0f} minutes of planning on one core.",
        "`vs best`: step time over that of `best`, geometric mean over the problems where both have a plan, "
        "below 1 is faster; 95 % bootstrap interval over problems; a tie is within 0.1 %.",
        "`gap`: over the largest lower bound (critical path, work, largest group, memory).",
    ]
    for view in dict.fromkeys(line.view for line in found.summaries):
        lines += ["", f"### {VIEWS[view]}", "", summary_table(found, view)]
    lines += ["", "### Step time over that of `best` by cluster", "", cluster_table(found)]
    reasons = missing(found)
    if reasons:
        lines += ["", "Not run: " + "; ".join(reasons) + "."]
    return "\n".join(lines)


def summary_table(comparison: Comparison, view: str) -> str:
    """Makes the table of planners over all problems of a view."""
    rows = []
    for line in comparison.summaries:
        if line.view == view:
            interval = "-" if line.low is None else f"{line.low:.3f}-{line.high:.3f}"
            counts = [f"{line.feasible}/{line.problems}", number(line.ratio), interval, line.wins, line.ties, line.losses]
            rows.append([line.planner, *counts, percent(line.gap), f"{line.simulator_calls:.0f}", f"{line.seconds:.2f}"])
    return markdown(["planner", "plans", "vs best", "interval", "wins", "ties", "losses", "gap", "calls", "s"], rows)


def cluster_table(comparison: Comparison) -> str:
    """Makes the table of geometric means by planner and cluster; planners that need another view have none."""
    rows, whole = [], [row for row in comparison.rows if row.view == TASKS and row.status == OK]
    for planner in dict.fromkeys(row.planner for row in whole):
        cells = []
        for cluster in CLUSTERS:
            mine = [row.ratio for row in whole if (row.planner, row.cluster) == (planner, cluster) and row.ratio is not None]
            cells.append(f"{number(geometric_mean(mine))} ({len(mine)})" if mine else "-")
        rows.append([planner, *cells])
    return markdown(["planner", *CLUSTERS], rows)


def missing(found: Comparison) -> list[str]:
    """Lists planners that failed, or whose extra is missing, with their first reason."""
    reasons: dict[str, str] = {}
    for row in found.rows:
        if row.status in ("missing", "failed"):
            reasons.setdefault(row.planner, f"{row.planner} on {row.model} ({row.reason})")
    return list(reasons.values())


def number(value: float | None) -> str:
    """Shows a ratio."""
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """Shows a share."""
    return "-" if value is None else f"{100 * value:.0f} %"


def main() -> None:
    """Compares, prints, and writes where that is asked for."""
    options = arguments(
        __doc__,
        out=(Path("matrix"), "folder of the rows (matrix)"),
        only=((), "only models with one of these texts in their name"),
        planners=(tuple(PLANNERS), "planners (all that are registered)"),
        groups=(64, "target number of groups (64)"),
        calls=(1024, "simulator calls of a search after the floor (1024)"),
        time_limit=(3.0, "seconds for every other planner (3)"),
        seeds=(3, "seeds of random planners (3)"),
        generated="one-shot planners and searches on generated problems",
        write="write benchmarks/RESULTS.md",
    )
    if options.generated:
        searches, drawn = ("annealing", "local_search"), Store(Settings(calls=options.calls, seeds=1))
        cases, names = generated(200), ("random", *ONE_SHOT, "best", *searches)
        compare(cases, names, drawn)
        return print_comparison(gather(drawn, cases, names))
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(calls=options.calls, time_limit_s=options.time_limit, seeds=options.seeds)
    store, cases = Store(settings, options.out / "step.jsonl", resume=True), []
    for case in cases_of(options.groups, options.only):
        cases.append(case)
        for failed, error in compare([case], options.planners, store):
            sys.exit(f"{failed.model} on {failed.cluster}: {error}")
        print(f"{case.model} on {case.cluster}", file=sys.stderr, flush=True)
    text = report(gather(store, cases, options.planners), options)
    print(text)
    if options.write:
        write_between(ROOT / "benchmarks/RESULTS.md", "matrix", text)


if __name__ == "__main__":
    main()
