"""Small valid files of every format, made by the code that people use."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec

CURVES: tuple[dict[str, Any], ...] = (
    {"name": "resnet", "points": [[256, 64], [2048, 64], [8192, 70], [32768, 110]]},
    {"min_epochs": 60, "critical_batch": 30000},
    {"updates_floor": 2000, "updates_samples": 7.7e7, "samples_per_epoch": 1281167},
)
FABRIC: dict[str, Any] = {
    "devices": [0, 1],
    "basis": "measured",
    "source": "test",
    "links": [[0, 1, 2e10]],
    "curves": [
        {"group_size": 2, "algorithm": "ring", "pieces": [[0, 2.4e-5, 2.28e10], [4194304, 2.3e-5, 2.26e10]]},
        {"kind": "all_gather", "group_size": 2, "pieces": [[0, 1e-5, 2e10]]},
    ],
}
REDUCED: dict[str, Any] = {
    "ops": [
        {"name": f"{name}/{phase}", "group": group, "phase": phase, "time_s": time_s, "kind": kind}
        for phase, time_s, kind in (("forward", 1e-3, ""), ("backward", 2e-3, ""), ("update", 1e-4, "collective"))
        for group, name in enumerate("ab")
    ],
    "tensors": [{"producer": op, "bytes": 64, "consumers": [op + 2]} for op in range(4)],
    "collectives": [{"ops": [4, 5], "channels": [0, 1]}],
}
"""Two groups a and b that end in a collective: fields of a problem."""
DATA = Path(__file__).parent / "data"
"""Seeds as files: two clusters, a cost table, a measurement."""

CLUSTERS = ("a100-80g:4", "h100:2x8", "a100-80g:4+v100:4,pcie,eth=25g", "cpu:1+l4:2,ib=8x400g", "host")
MODELS = ("zoo:mlp,width=8,depth=2", "zoo:dlrm", "zoo:nothing,x=1", "nowhere.module:function", "nowhere.py:function,x=1")
RATES = ("1gbit", "0,50mbit;200mbit,0", "100 Mbit/s")
CORES = ("0,1", "0-1,2-3")
SPACES = ("tensor=1,2,4 sharding=0,1", "schedule=1f1b,zbv recompute=none offload=optimizer,all", "microbatch=8", "")


def make_seeds(folder: Path) -> None:
    """Writes a seed of every format into a new folder.

    Args:
        folder: That must not exist.
    """
    folder.mkdir(parents=True)
    problem = _problems(folder)
    _plans(folder, problem)
    _graph_and_costs(folder)
    _measured(folder)
    _agent(folder, problem)
    _comparison(folder)
    _records(folder)
    for path in DATA.iterdir():
        shutil.copy(path, folder)
    for kind, texts in (("cluster", CLUSTERS), ("model", MODELS), ("rates", RATES), ("cores", CORES), ("space", SPACES)):
        for number, text in enumerate(texts):
            (folder / f"{kind}{number}.text").write_text(text)


def _write(path: Path, kind: str, data: dict[str, Any]) -> None:
    path.write_text(json.dumps({"format": f"rlplace.{kind}", "version": 1, **data}))


def _problems(folder: Path) -> Any:
    from rlplace.problem import problem_from_dict, problem_to_dict
    from rlplace.problem.build import TensorSpec, build_problem

    edges = [TensorSpec(0, 0, [1, 2]), TensorSpec(1, 0, [3]), TensorSpec(2, 0, [3])]
    toy = problem_to_dict(build_problem("fork_join", time_s=[[1.0, 1.0]] * 4, tensors=edges, memory_bytes=[None, None]))
    toy["devices"][0] |= {"memory_bytes": 80000, "reserved_bytes": 600, "kind": "a100-80g"}
    toy["tensors"][0]["transfer_s"] = [[0, 1], [1, 0]]
    toy["ops"][0] |= {"kind": "gemm", "dims": {"m": 8}, "temporary_bytes": 5}
    toy["source"] = {"model": "zoo:mlp", "graph": {"model": "zoo:mlp", "batch": 8}}
    problem = problem_from_dict(toy)
    problem.save(folder / "toy.problem.json")
    joined = {
        **toy,
        "links": {"bandwidth_bytes_per_s": [[0, 2e11], [2e11, 0]], "latency_s": [[0, 1e-5], [1e-5, 0]],
                  "channels": [[[], [0, 3]], [[1, 2], []]], "fabrics": [FABRIC]},
        "groups": [{"name": "a", "resident_bytes": 40, "weight_bytes": 10, "gradient_bytes": 10, "optimizer_bytes": 20},
                   {"name": "b", "resident_bytes": 64, "device": 1}],
        **REDUCED,
    }  # fmt: skip
    (folder / "joined.problem.json").write_text(json.dumps(joined))
    return problem


def _plans(folder: Path, problem: Any) -> None:
    from rlplace.plan.plan import make_plan
    from rlplace.plan.prediction import Prediction

    half = [group % 2 for group in range(problem.num_groups)]
    predicted = Prediction(1.0, 8.0, (1, 2), feasible=True, executor="list")
    order = [[op for op in range(problem.num_ops) if half[problem.op_group[op]] == device] for device in range(2)]
    plans = {
        "told": {"predicted": predicted},
        "ordered": {"order": order},
        "ranked": {"priority": list(range(problem.num_ops))},
    }
    for name, fields in plans.items():
        make_plan(problem, half, planner="best", **fields).save(folder / f"{name}.plan.json")
    source = {
        "graph": {"model": "zoo:mlp", "batch": 8, "seq": 1, "dtype": "fp32", "optimizer": "adam",
                  "inputs": {"args": [{"tensor": [8, 4], "dtype": "float32"}, {"value": 1}], "kwargs": {"x": {"tuple": []}}}},
        "cluster": "l4:2", "cluster_fingerprint": None, "groups": 2, "level": "task", "host": "eager", "costs": {"path": None},
        "op_times": {"l4": {"scaled": 1.0}},
    }  # fmt: skip
    dataclasses.replace(make_plan(problem, half, planner="best"), source=source).save(folder / "sourced.plan.json")


def _graph_and_costs(folder: Path) -> None:
    import torch
    from torch import nn

    from rlplace.cluster import Cluster
    from rlplace.cost import price
    from rlplace.model.capture.capture import capture

    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    graph = capture(net, torch.empty(4, 4), loss=torch.sum, source={"model": "test"})
    graph.save(folder / "net.graph.json")
    price(graph, "l4:2", groups=2, level="op").save(folder / "ops.problem.json")
    Cluster.preset("l4:2").save(folder / "saved.toml")
    _strategies(folder, graph)


def _strategies(folder: Path, graph: Any) -> None:
    """Plans of whole strategies: one stage, a chain with every word, several pipelines."""
    from rlplace.cluster import Cluster
    from rlplace.plan.strategy import Pipeline, Stage, Strategy
    from rlplace.strategy.search.plan import plan_strategy

    whole = plan_strategy(graph, Cluster.preset("l4:2"), 8, calls=40)
    whole.save(folder / "whole.plan.json")
    words: dict[str, Any] = {"recompute": {"0": "full"}, "offload": {"0": "optimizer"}}
    chain = Pipeline((Stage(("0",), (0,), **words), Stage(("2",), (1,))), (4,), (2,), "1f1b")
    alone = Pipeline((Stage(("0", "2"), (0, 1), {"shard": 2}, 3),), (4,), (1,))
    few = [Pipeline((Stage(("0", "2"), (device,)),), (4,), (1,)) for device in range(2)]
    for name, pipelines in (("chain", (chain,)), ("sharded", (alone,)), ("several", tuple(few))):
        dataclasses.replace(whole, strategy=Strategy(8, pipelines)).save(folder / f"{name}.plan.json")


def _measured(folder: Path) -> None:
    from rlplace.cost.timings import PlaceTiming, PlanTiming, PlanTimings
    from rlplace.measure.log import Ended, Run, RunLog

    place = PlaceTiming(0, "a", 0.1, 0.02, 0.01, peak_memory_bytes=123, predicted_busy_s=0.09, predicted_peak_bytes=120)
    timing = PlanTiming("p", "9f", "4a", "heft", "joint_graph", (0.1, 0.11, 0.1, 0.12), (place,), 0.8, 0.1)
    PlanTimings("mlp", {"torch": "2.13", "threads": 1}, (timing,)).save(folder / "job.timings.json")
    for number, curve in enumerate(CURVES):
        _write(folder / f"curve{number}.curve.json", "batch_curve", curve)
    log = RunLog(folder / "lab.runs.jsonl")
    for number in range(3):
        strategy = {"batch": 8, "microbatch": [4], "microbatches": [2], "stages": [{"blocks": ["a", "b"], "devices": [number]}]}
        run = Run(
            question="q",
            site="lab",
            strategy=strategy,
            kinds=("cpu", "cpu"),
            hosts=(0, 0),
            features=(1.0, 0.5),
            predicted_s=0.1,
            predicted_share=0.5,
            expected_s=0.12,
            fits=0.9,
        )
        log.end(log.begin(run), Ended("done", (0.1, 0.2), 0.4) if number else Ended("crashed", reason="it"))


def _agent(folder: Path, problem: Any) -> None:
    import numpy as np
    import torch

    from rlplace.agents.checkpoint import save_checkpoint, save_state
    from rlplace.agents.config import TrainConfig
    from rlplace.agents.move_ranking import PricedMoves
    from rlplace.agents.network import PlacerNetwork
    from rlplace.agents.problems.cases import ProblemCase, save_cases
    from rlplace.envs.guide.features import FEATURES

    agent = folder / "agent"
    network = PlacerNetwork(hidden=4, second=4, features=FEATURES)
    optimizer = torch.optim.Adam(network.parameters())
    sum(p.square().sum() for p in network.parameters()).backward()
    optimizer.step()
    config = msgspec.structs.asdict(TrainConfig.load(hidden=4, second=4))
    training = {
        "steps_done": 2,
        "fitted": 1,
        "parts": 1,
        "notes": {"seconds": 1.0},
        "problem_set": "all",
        "hyperparameters": config,
    }
    save_checkpoint(agent, network, training=training, card="# test\n")
    bare = folder / "bare"  # without the digest of its weights, as checkpoints of others may be
    save_checkpoint(bare, network, training=training, card="# test\n")
    plain = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({key: value for key, value in plain.items() if key != "weights"}))
    save_state(agent / "optimizer.safetensors", network, optimizer.state_dict(), (1, 2, 1))
    save_cases([ProblemCase("toy", "toy", problem, False)], folder / "cases", made_by={"torch": "2"})
    rows = np.zeros((2, 3, len(FEATURES)), dtype=np.float16)
    PricedMoves(rows, np.zeros((2, 3), dtype=np.float32)).save(folder / "labels.safetensors")
    _training(folder)


class Position:
    """A data loader, as far as checkpoints know it."""

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"yielded": 3, "iterator": {"generator": torch.Generator().get_state(), "finished": False}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import torch

        torch.Generator().set_state(state["iterator"]["generator"])


def _training(folder: Path) -> None:
    import torch

    from rlplace.runtime.state.training_state import save_checkpoint

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(folder / "training", model, optimizer, step=3, loader=Position(), extra={"problem": "4a"})


def _comparison(folder: Path) -> None:
    from rlplace.explanation.compare import Settings, Store
    from rlplace.explanation.compare.records import ComparisonRow, ProblemInfo

    store = Store(Settings(calls=4), folder / "rows.jsonl")
    store.add_problem(_filled(ProblemInfo))
    store.add_row(_filled(ComparisonRow))


def _records(folder: Path) -> None:
    """Says what crosses processes as JSON, and a networkx graph."""
    nodes = [[name, {"time_s": [1e-3, 2e-3], "resident_bytes": 64, "temporary_bytes": 8, "phase": "forward", "kind": "gemm"}]
             for name in "abc"]  # fmt: skip
    nodes[0][1] |= {"group": "first", "device": 1}  # type: ignore[operator]
    graph = {"nodes": nodes, "edges": [["a", "b", {"bytes": 64, "tensor": 0}], ["a", "c", {"bytes": 64, "tensor": 0}]]}
    (folder / "graph.nx.json").write_text(json.dumps(graph))


def _filled(kind: type[Any]) -> Any:
    """Returns a record of a comparison with a value of the right type in every field."""
    plain = {"str": "toy", "Count": 2, "Whole": 2, "bool": False}
    chosen = {"status": "ok", "view": "tasks"}
    return kind(**{f: chosen.get(f, plain.get(name.split(" | ")[0], 0.5)) for f, name in kind.__annotations__.items()})
