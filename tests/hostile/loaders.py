"""The loaders: how each is given a file, and the next step that what it loads must survive."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlplace.errors import RlplaceError
from tests.hostile.damage import BYTES, JSON, LINES, TENSORS, TEXT, TOML

Use = Callable[[Path, Path], None]

MAX_MESSAGE = 1000
"""Length to which `rlplace.errors.plain` cuts messages."""


@dataclass(frozen=True)
class Target:
    """One loader.

    Attributes:
        kind: How its files are damaged.
        files: Seeds, of which each input damages one.
        use: Loads the damaged file, given its path and the folder of all seeds, and does the next step with it.
        share: Its share of the inputs, relative to the others.
    """

    kind: str
    files: tuple[str, ...]
    use: Use
    share: float = 1.0


class Broken(Exception):
    """An error: what was loaded gives nonsense at the next step."""


def run_input(target: Target, file: str, payload: bytes, scratch: Path) -> str:
    """Gives one input to a loader.

    Args:
        target: The loader.
        file: Name in `scratch` that the input takes.
        payload: The input.
        scratch: A copy of all seeds, which is left as it was.

    Returns:
        ``"loaded"``, ``"refused"`` or what went wrong, with a traceback.
    """
    path = scratch / file
    before, known = path.read_bytes(), _listing(scratch)
    try:
        path.write_bytes(payload)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.use(path, scratch)
        outcome = "loaded"
    except RlplaceError as error:
        text = str(error)
        plain = 0 < len(text) <= MAX_MESSAGE and text.isprintable()
        outcome = "refused" if plain else f"a message that is not one plain line: {text[:300]!r}"
    except Exception:
        outcome = traceback.format_exc(limit=-6)
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)
    left = sorted(_listing(scratch) ^ known)
    for name in left:
        (scratch / name).unlink(missing_ok=True)
    return f"left {left}" if left and outcome in ("loaded", "refused") else outcome


def _listing(folder: Path) -> set[str]:
    return {os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names}


def _check(good: bool, what: str) -> None:
    if not good:
        raise Broken(what)


def _comes_back(record: Any, path: Path, load: Callable[[Path], Any]) -> None:
    """Says what is saved has the same fingerprint when it is loaded again."""
    record.save(path)
    try:
        _check(load(path).fingerprint == record.fingerprint, "another fingerprint on the way back")
    finally:
        path.unlink()


def _simulated(problem: Any, plan: Any) -> None:
    from rlplace.simulator import simulate

    timeline = simulate(problem, plan)
    step = timeline.step_time_s
    _check(step is None or (math.isfinite(step) and step >= 0), f"step time {step}")
    _check(bool((timeline.peak_memory_bytes >= 0).all()), f"peaks {timeline.peak_memory_bytes}")


def _problem(path: Path, seeds: Path) -> None:
    from rlplace.cluster.collectives import collective_s
    from rlplace.problem import Problem, problem_from_dict, problem_to_dict

    problem = Problem.load(path)
    everywhere = range(problem.num_devices)
    for kind in ("all_reduce", "broadcast", "all_to_all"):
        _check(collective_s(problem.links, kind, everywhere, 1e6) >= 0, f"a time of {kind}")
    device = min(1, problem.num_devices - 1)
    _simulated(problem, [device if d < 0 else int(d) for d in problem.group_device])
    _check(
        problem_from_dict(problem_to_dict(problem)).fingerprint == problem.fingerprint, "another fingerprint on the way back"
    )
    from rlplace.placement import get_planner

    try:
        get_planner("heft")(problem)
    except RecursionError as error:
        raise Broken("heft recursed") from error


@cache
def _known(path: Path) -> Any:
    from rlplace.problem import Problem

    return Problem.load(path)


def _plan(path: Path, seeds: Path) -> None:
    from rlplace.cost.footprint import footprint
    from rlplace.plan import PlacementPlan

    problem = _known(seeds / "toy.problem.json")
    plan = PlacementPlan.load(path, problem)
    _simulated(problem, plan)
    if problem.resident_bytes.sum() == (problem.weight_bytes + problem.gradient_bytes + problem.optimizer_bytes).sum():
        footprint(problem, plan)
    _comes_back(plan, path.with_name("again.plan.json"), lambda again: PlacementPlan.load(again, problem))


@cache
def _asked(path: Path) -> Any:
    from rlplace.cluster import Cluster
    from rlplace.strategy.search.plan import ask

    return ask(_net(path), Cluster.preset("l4:2"), 8)


def _strategy(path: Path, seeds: Path) -> None:
    from rlplace.cli.plan_tables import show_strategy
    from rlplace.errors import InputError
    from rlplace.explanation.report.report import render
    from rlplace.explanation.timeline import strategy_page
    from rlplace.plan import PlacementPlan
    from rlplace.planned import Planned

    plan = PlacementPlan.load(path)
    _comes_back(plan, path.with_name("again.plan.json"), PlacementPlan.load)
    question = _asked(seeds / "net.graph.json")
    if plan.strategy is None:
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(InputError):
        show_strategy(plan, question.cluster)
    with contextlib.suppress(InputError):  # another model's, or more than a page holds
        data = strategy_page(Planned(plan, question.cluster, search_problem=question))
        _check(0 <= (data.timeline.step_time_s or -1.0) < math.inf, f"step time {data.timeline.step_time_s}")
        render(data)


def _space(path: Path, seeds: Path) -> None:
    from rlplace.strategy.search.space import Space

    space = Space.parse(path.read_text(errors="replace")[:10_000])
    _check(Space.parse(space.text()) == space, "another space on the way back")


def _source(path: Path, seeds: Path) -> None:
    from rlplace.plan import PlacementPlan
    from rlplace.planned import Planned
    from rlplace.runtime.base.steps import micro_batch

    plan = PlacementPlan.load(path)
    planned = Planned(plan)
    _ = planned.recipe
    if not str((plan.source or {}).get("cluster")).startswith("host"):
        _ = planned.cluster
    micro_batch(plan, None)


def _graph(path: Path, seeds: Path) -> None:
    from rlplace.cost import price
    from rlplace.model import OpGraph

    problem = price(OpGraph.load(path), "l4:2", groups=2)
    _simulated(problem, [0] * problem.num_groups)


@cache
def _net(path: Path) -> Any:
    from rlplace.model import OpGraph

    return OpGraph.load(path)


def _cluster(path: Path, seeds: Path) -> None:
    from rlplace.cluster import Cluster
    from rlplace.cost import price

    cluster = Cluster.load(path)
    problem = price(_net(seeds / "net.graph.json"), cluster, groups=2)
    _simulated(problem, [problem.num_devices - 1] * problem.num_groups)
    _comes_back(cluster, path.with_name("again.toml"), Cluster.load)


def _cluster_text(path: Path, seeds: Path) -> None:
    from rlplace.cluster.parse import parse

    text = path.read_text(errors="replace")
    if "host" not in text or text == "host":
        cluster = parse(text[:10_000])
        _check(len(cluster.devices) <= 4096, "too many devices")


def _costs(path: Path, seeds: Path) -> None:
    from rlplace.cluster.presets import KINDS
    from rlplace.cost.compute import explain_times
    from rlplace.cost.table import CostTable

    table = CostTable.load(path)
    seconds = explain_times(_net(seeds / "net.graph.json"), KINDS["l4"], table).seconds
    _check(CostTable.from_dict(table.to_dict()) == table, "another table on the way back")
    _check(bool(((seconds >= 0) & (seconds < 1e9)).all()), f"op times {seconds}")


def _measurement(path: Path, seeds: Path) -> None:
    from rlplace.cluster.presets import KINDS
    from rlplace.cost.compute import explain_times
    from rlplace.cost.timings import Measurement
    from rlplace.measure.calibrate import calibrate

    measurement = Measurement.load(path)
    _check(Measurement.from_dict(measurement.to_dict()) == measurement, "another measurement on the way back")
    table = calibrate([measurement], KINDS["cpu"], holdout=0.5).table
    seconds = explain_times(_net(seeds / "net.graph.json"), KINDS["cpu"], table).seconds
    _check(bool((seconds >= 0).all()), f"op times {seconds}")


def _timings(path: Path, seeds: Path) -> None:
    from rlplace.cost.timings import PlanTimings

    timings = PlanTimings.load(path)
    for plan in timings.plans:
        _check(math.isfinite(plan.median_s) and math.isfinite(plan.spread) and math.isfinite(plan.error or 0.0), "not finite")
    json.dumps(timings.to_dict(), allow_nan=False)


def _runs(path: Path, seeds: Path) -> None:
    from rlplace.measure.log import read_runs, shared

    runs = read_runs(path)
    for run in runs:
        _check(run.median_s is None or math.isfinite(run.median_s), "a median is not finite")
    _check(all(not run.reason for run in shared(runs)), "a reason is shared")


def _curve(path: Path, seeds: Path) -> None:
    from rlplace.strategy.search.efficiency import BatchCurve

    curve = BatchCurve.load(path)
    for batch in (1, 256, 10**6):
        _check(0 < curve.epochs(batch) < math.inf, f"{curve.epochs(batch)} epochs")


def _rows(path: Path, seeds: Path) -> None:
    from rlplace.explanation.compare import Settings, Store

    Store(Settings(calls=4), path, resume=True)


def _cases(path: Path, seeds: Path) -> None:
    from rlplace.agents.problems.cases import load_cases

    for case in load_cases(path.parent)[0]:
        _simulated(case.problem, [max(0, int(d)) for d in case.problem.group_device])


def _agent(path: Path, seeds: Path) -> None:
    import torch

    from rlplace.agents.checkpoint import load_checkpoint

    network = load_checkpoint(path.parent).network
    _check(all(bool(torch.isfinite(value).all()) for value in network.state_dict().values()), "weights that are not finite")


def _resume(path: Path, seeds: Path) -> None:
    from rlplace.agents.problems.sources import CaseSource
    from rlplace.agents.train import TrainingRun
    from rlplace.cli.train import TrainOptions, _config

    config, _ = _config(TrainOptions(resume=str(path.parent)), path.parent)
    run = TrainingRun(CaseSource("none", lambda number: None, 0), config, path.parent, True, False, str)  # type: ignore[arg-type]
    if run._moments is not None:
        import torch

        optimizer = torch.optim.Adam(run.network.parameters())
        optimizer.load_state_dict(run._moments)
        for parameter in run.network.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def _labels(path: Path, seeds: Path) -> None:
    from rlplace.agents.move_ranking import PricedMoves

    labels = PricedMoves.load(path)
    _check(labels.features.ndim == 3 and labels.change.shape == labels.features.shape[:2], "shapes")


def _training(path: Path, seeds: Path) -> None:
    import torch

    from rlplace.runtime.state.training_state import load_checkpoint
    from tests.hostile.seeds import Position

    model = torch.nn.Linear(3, 2)
    load_checkpoint(path.parent, model, torch.optim.Adam(model.parameters()), loader=Position())


def _model(path: Path, seeds: Path) -> None:
    from rlplace.model.zoo import load_model

    text = path.read_text(errors="replace")[:2000]
    if text.startswith("zoo:") or text.startswith("nowhere"):
        load_model(text, batch=2, seq=4)


def _rates(path: Path, seeds: Path) -> None:
    from tools.hosts.spec import parse_rates

    parse_rates(path.read_text(errors="replace"))


def _cores(path: Path, seeds: Path) -> None:
    from tools.hosts.spec import parse_cores

    parse_cores(path.read_text(errors="replace"))


def _networkx(path: Path, seeds: Path) -> None:
    import networkx as nx

    from rlplace.cluster import Cluster
    from rlplace.problem import Problem

    try:
        data = json.loads(path.read_text(errors="replace"))
        graph = nx.DiGraph()
        graph.add_nodes_from((str(name), dict(node)) for name, node in data["nodes"])
        graph.add_edges_from((str(source), str(target), dict(edge)) for source, target, edge in data["edges"])
    except Exception:  # no graph at all: nothing to load
        return
    problem = Problem.from_networkx(graph, Cluster.preset("l4:2"))
    _simulated(problem, [max(0, int(d)) for d in problem.group_device])


TARGETS: dict[str, Target] = {
    "problem": Target(JSON, ("toy.problem.json", "joined.problem.json", "ops.problem.json"), _problem, 3.0),
    "plan": Target(JSON, tuple(f"{name}.plan.json" for name in ("told", "ordered", "ranked")), _plan, 3.0),
    "strategy plan": Target(
        JSON, tuple(f"{name}.plan.json" for name in ("whole", "chain", "sharded", "several")), _strategy, 3.0
    ),
    "SPACE text": Target(TEXT, tuple(f"space{n}.text" for n in range(4)), _space, 0.5),
    "plan source": Target(JSON, ("sourced.plan.json",), _source),
    "op graph": Target(JSON, ("net.graph.json",), _graph, 2.0),
    "cluster file": Target(TOML, ("topology.toml", "rules.toml", "saved.toml"), _cluster, 2.0),
    "CLUSTER text": Target(TEXT, tuple(f"cluster{n}.text" for n in range(5)), _cluster_text, 0.5),
    "costs": Target(JSON, ("lab.cost.json",), _costs),
    "measurement": Target(JSON, ("mlp.measure.json",), _measurement),
    "timings": Target(JSON, ("job.timings.json",), _timings),
    "runs": Target(BYTES, ("lab.runs.jsonl",), _runs, 0.5),
    "batch curve": Target(JSON, tuple(f"curve{n}.curve.json" for n in range(3)), _curve),
    "comparison lines": Target(LINES, ("rows.jsonl",), _rows, 0.5),
    "cases": Target(JSON, ("cases/cases.json", "cases/toy.problem.json"), _cases),
    "agent config": Target(JSON, ("agent/config.json",), _agent),
    "agent weights": Target(TENSORS, ("bare/policy.safetensors", "agent/policy.safetensors"), _agent),
    "resume config": Target(JSON, ("agent/config.json",), _resume),
    "resume state": Target(TENSORS, ("agent/optimizer.safetensors",), _resume),
    "labels": Target(BYTES, ("labels.safetensors",), _labels, 0.5),
    "training facts": Target(JSON, ("training/step-00000003/rlplace.json",), _training, 0.5),
    "training index": Target(BYTES, ("training/step-00000003/.metadata",), _training, 0.5),
    "training tensors": Target(BYTES, ("training/step-00000003/__0_0.distcp",), _training, 0.5),
    "training loader": Target(BYTES, ("training/step-00000003/loader.pt",), _training, 0.5),
    "MODEL text": Target(TEXT, tuple(f"model{n}.text" for n in range(5)), _model, 0.25),
    "rates text": Target(TEXT, tuple(f"rates{n}.text" for n in range(3)), _rates, 0.5),
    "cores text": Target(TEXT, tuple(f"cores{n}.text" for n in range(2)), _cores, 0.5),
    "networkx": Target(JSON, ("graph.nx.json",), _networkx),
}
"""By name; files that a person may be handed, texts of the command line, and records that cross processes as JSON."""
