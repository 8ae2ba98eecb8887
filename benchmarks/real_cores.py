"""Predicted against measured step time of whole strategies on two emulated hosts of one core each that compute for real.

    sudo python -m benchmarks.real_cores            all rows, about half an hour; rows that stand there are not run again
    sudo python -m benchmarks.real_cores --table    a table of the rows

Every host is pinned to a core of its own. Ops are timed by `rlplace measure` and fitted by `rlplace calibrate` in three ways:
*alone*, on one core while the other idles; *together*, on both at once, so that they share what cores share (caches, memory,
clock); *together, whole steps*, where the factor of whole steps over the sum of their ops, found at once on both, is the one of
steps as the runtime runs them: one device's plan, timed beside the ops. Links are measured; nothing of the other plans is.
Needs root and two idle cores.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import emulated
from benchmarks.harness import Row, add_row, markdown
from rlplace.cluster.presets import cpu_kind
from rlplace.cost.table import CostTable
from rlplace.cost.timings import Measurement
from rlplace.errors import InputError
from rlplace.measure.calibrate import calibrate
from rlplace.plan.plan import PlacementPlan
from tools.hosts import HostsSpec, emulated_hosts, measure_cluster
from tools.hosts.spec import parse_rate

HOSTS, BATCH, SEQ, STEPS = 2, 16, 64, 7
RATES = ("1gbit", "200mbit")
ALONE, TOGETHER, STEPS_TOO = "alone", "together", "together, whole steps"
ROWS = Path(__file__).with_suffix(".jsonl")
CORES = ((0,), (1,))
WORKER = ["benchmarks.real_cores", "--worker"]


def hosts_of(count: int, rate: str = "1gbit") -> HostsSpec:
    """Returns the first hosts, each on its core."""
    return HostsSpec(count, parse_rate(rate), cpus=CORES[:count])


@cache
def costs_of(model: str) -> dict[str, tuple[CostTable, str]]:
    """Returns cost tables by way, with the name of the device kind."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, count in ((ALONE, 1), (TOGETHER, HOSTS)):
            emulated.on_hosts(hosts_of(count), [*WORKER, "measure", model, folder + f"/{count}"])
            files = sorted(Path(folder).glob(f"{count}-*.measure.json"))
            measured = [Measurement.load(path) for path in files]
            name = measured[0].environment.device_kind
            found[way] = (calibrate(measured, cpu_kind(1, 1 << 40, name), by_model=False).table, name)
    return found


def with_steps(tables: dict[str, tuple[CostTable, str]], cell: dict[str, Any]) -> tuple[CostTable, str]:
    """Returns the table of ops timed together whose whole steps on one device take what the runtime takes for them."""
    table, name = tables[TOGETHER]
    (told,) = emulated.on_hosts(hosts_of(HOSTS), [*WORKER, "alike"], [cell])
    factor = float(np.median(told["step_s"])) / cell["predicted_s"][TOGETHER]
    costs = table.kinds[name]
    return dataclasses.replace(table, kinds={name: dataclasses.replace(costs, step_factor=costs.step_factor * factor)}), name


@cache
def links_of(rate: str, name: str) -> Any:
    """Returns the hosts with the links and collectives that are measured between them."""
    with emulated_hosts(hosts_of(HOSTS, rate)) as hosts:
        return measure_cluster(hosts, kinds=[cpu_kind(1, 1 << 40, name)] * HOSTS)


def cells(model: str, rate: str) -> Iterator[dict[str, Any]]:
    """Yields every strategy that runs, with its prediction by way."""
    from rlplace.strategy.costs import Cut
    from rlplace.strategy.search.op_level import OpLevel
    from rlplace.strategy.search.plan import ask
    from rlplace.strategy.search.search import search

    first, other, why_not, only = emulated.captured(model, SEQ)
    tables = costs_of(model)

    def question(table: CostTable, name: str) -> Any:
        return ask(first, links_of(rate, name), BATCH, other=other, why_not=why_not, only=only, costs=table)

    questions = {way: question(*tables[way]) for way in (ALONE, TOGETHER)}
    plain = questions[TOGETHER]
    one = next(emulated.drafts(plain.costs.passes(0, Cut(BATCH)).forward_s, HOSTS))[1]
    known = {"model": model, "strategy": one.strategy(plain.costs.names).to_dict(), "name": "one device"}
    known["predicted_s"] = {TOGETHER: OpLevel(plain, float("inf")).evaluate(one).step_time_s}
    questions[STEPS_TOO] = question(*with_steps(tables, known))
    finer = {way: OpLevel(asked, float("inf")) for way, asked in questions.items()}
    found = dict(emulated.drafts(plain.costs.passes(0, Cut(BATCH)).forward_s, HOSTS))
    found["the planner's pick"] = search(plain, calls=1000).ranked[0].draft
    for name, draft in found.items():
        try:
            strategy = draft.strategy(plain.costs.names)
            reason = None if plain.why_not is None else plain.why_not(draft)
            predicted = {way: one.evaluate(draft).step_time_s for way, one in finer.items()}
        except InputError as error:
            reason = str(error)
        if reason is not None:
            print(f"{model} {rate} {name}: {reason}", file=sys.stderr)
            continue
        yield {"model": model, "rate": rate, "name": name, "predicted_s": predicted, "strategy": strategy.to_dict()}


def time_ops(model: str, out: str) -> None:
    """Times, in a worker, ops and steps of a model at the sizes of whole and quartered batches."""
    from rlplace.cli.main import main as rlplace

    for batch in (BATCH, BATCH // 4):
        words = ["measure", emulated.MODELS[model], "--ops", "--step", "--threads", "1", "--time-limit", "30"]
        words += ["--batch", str(batch), "--seq", str(SEQ)]
        code = rlplace([*words, "--out", f"{out}-{os.environ['RANK']}-{batch}.measure.json"])
        if code:
            sys.exit(code)


def time_plans(path: str, alike: bool = False) -> None:
    """Times, in a worker, the steps of every plan of a file; `alike` runs one device's plan on every host at once."""
    import torch
    import torch.distributed as dist

    from rlplace.model.zoo import load_model
    from rlplace.plan.strategy import Strategy
    from rlplace.runtime.base.ranks import start_group
    from rlplace.runtime.base.steps import train_step
    from rlplace.runtime.job.distribute import distribute

    torch.set_num_threads(1)
    if alike:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    start_group("gloo", emulated.LIMIT_S)
    for cell in json.loads(Path(path).read_text()):
        strategy = Strategy.from_dict(cell["strategy"])
        torch.manual_seed(0)
        size = strategy.pipelines[0].microbatch[0]
        loaded = load_model(emulated.MODELS[cell["model"]], batch=size, seq=SEQ, device="cpu")
        plan = PlacementPlan("0" * 64, "emulated", 0, np.zeros(0, dtype=np.int32), strategy=strategy)
        model = distribute(loaded.module, plan, loaded.example_inputs, loss=loaded.loss, device="cpu")
        optimizer = torch.optim.Adam(model.parameter_groups(), lr=0.0)
        batch = load_model(emulated.MODELS[cell["model"]], batch=BATCH, seq=SEQ, device="cpu").example_inputs
        seconds = []
        for _ in range(STEPS + 2):
            dist.barrier()
            begin = time.perf_counter()
            train_step(model, optimizer, batch)
            took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds.append(took.item())
        if dist.get_rank() == 0:
            print(json.dumps({"name": cell["name"], "step_s": seconds[2:]}), flush=True)
    dist.destroy_process_group()


def measure(asked_for: Sequence[Row], rate: str) -> None:
    """Runs plans and adds their rows."""
    for count in (1, HOSTS):
        batch = [cell for cell in asked_for if emulated.width(cell) == count]
        told = emulated.on_hosts(hosts_of(count, rate), [*WORKER, "plans"], batch, 3600) if batch else []
        timed = {one["name"]: one["step_s"] for one in told}
        for cell in batch:
            if cell["name"] in timed:
                row = {key: cell[key] for key in ("model", "rate", "name", "predicted_s")}
                add_row(ROWS, {**row, "step_s": timed[cell["name"]]})


def table() -> str:
    """Makes the table by model, rate and way."""
    lines = []
    for (model, rate), mine in emulated.by_cell(ROWS).items():
        measured = [float(np.median(row["step_s"])) for row in mine]
        for way in mine[0]["predicted_s"]:
            shown = emulated.accuracy([row["predicted_s"][way] for row in mine], measured)
            lines.append([f"{model}, {rate}", len(mine), way, *shown])
    heads = ["model, links", "plans", "ops timed", "rank correlation", "mean error", "pick above the fastest"]
    return markdown(heads, lines)


def worker(what: str, *rest: str) -> None:
    """Times ops or plans in this process."""
    time_ops(*rest) if what == "measure" else time_plans(*rest, alike=what == "alike")


if __name__ == "__main__":
    emulated.main(__doc__, RATES, ROWS, cells, measure, table, worker)
