"""Mutated files of every format: a loader answers with a record that works or with one line, and with nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.hostile.seeds import COSTS, FABRIC, MEASUREMENT, REDUCED
from rlplace.agents.checkpoint import load_checkpoint, save_checkpoint
from rlplace.agents.network import NetworkConfig, PlacerNetwork
from rlplace.cluster import Cluster
from rlplace.cluster.presets import KINDS
from rlplace.cluster.toml import cluster_to_dict
from rlplace.cost import price
from rlplace.cost.calibrate import calibrate
from rlplace.cost.compute import op_times
from rlplace.cost.footprint import footprint
from rlplace.cost.measurement import Measurement
from rlplace.cost.table import CostTable
from rlplace.envs.guide.features import FEATURES
from rlplace.errors import InputError
from rlplace.graph import OpGraph
from rlplace.graph.capture import capture
from rlplace.graph.io import graph_to_dict
from rlplace.plan import PlacementPlan
from rlplace.plan.plan import make_plan
from rlplace.plan.prediction import Prediction
from rlplace.problem import Problem, problem_from_dict, problem_to_dict
from rlplace.problem.collectives import collective_channels, collective_s
from rlplace.simulator import expand, simulate

PROBLEM: dict[str, Any] = {
    "format": "rlplace.problem",
    "version": 1,
    "name": "toy",
    "samples_per_microbatch": 8,
    "devices": [
        {"name": "gpu0", "memory_bytes": 80000, "reserved_bytes": 600, "kind": "a100-80g"},
        {"name": "gpu1", "memory_bytes": None},
    ],
    "links": {
        "bandwidth_bytes_per_s": [[0, 2e11], [2e11, 0]],
        "latency_s": [[0, 1e-5], [1e-5, 0]],
        "channels": [[[], [0, 3]], [[1, 2], []]],
    },
    "groups": [
        {"name": "a", "resident_bytes": 40, "weight_bytes": 10, "gradient_bytes": 10, "optimizer_bytes": 20, "device": None},
        {"name": "b", "resident_bytes": 64, "device": 1},
    ],
    "ops": [
        {"name": "a/forward", "group": 0, "phase": "forward", "time_s": [0.001, 0.002], "temporary_bytes": 0},
        {"name": "b/forward", "group": 1, "phase": "forward", "time_s": 0.002, "kind": "linear", "dims": {"batch": 8}},
        {"name": "b/backward", "group": 1, "phase": "backward", "time_s": [None, 0.002], "temporary_bytes": 5},
    ],
    "tensors": [
        {"producer": 0, "bytes": 1024, "consumers": [1, 2], "transfer_s": [[0, 1], [1, 0]]},
        {"owner": 0, "bytes": 2048, "consumers": [2]},
        {"producer": 1, "bytes": 0, "consumers": [2]},
    ],
    "source": {"model": "hf:toy"},
}

JOINED: dict[str, Any] = PROBLEM | {
    "links": PROBLEM["links"] | {"fabrics": [FABRIC]},
    "groups": [{"name": name, "resident_bytes": 40} for name in "ab"],
    **REDUCED,
}
TOPOLOGY: dict[str, Any] = {
    "format": "rlplace.cluster",
    "version": 1,
    "device": [{"name": f"d{i}", "kind": "l4", "host": i // 2} for i in range(4)],
    "topology": {
        "resource": [
            {"name": "{device} out", "each": "*", "bytes_per_s": 55e9},
            {"name": "{device} in", "each": ["d0", "d1", "d2", "d3"], "bytes_per_s": 55e9},
            {"name": "sockets", "bytes_per_s": 45e9, "latency_s": 1e-6},
            {"name": "switch"},
        ],
        "path": [
            {"from": "*", "to": "*", "over": ["{from} out", "switch", "{to} in"], "latency_s": 1e-5, "efficiency": 0.9},
            {"from": ["d0", "d1"], "to": "d2", "over": ["{from} out", "sockets", "{to} in"]},
        ],
    },
    "fabric": [FABRIC],
}
COSTS_FILE = {"format": "rlplace.cost", "version": 1, **COSTS}
MEASUREMENT_FILE = {"format": "rlplace.measurement", "version": 1, **MEASUREMENT}

HUGE_INTEGER = 10**5000
VALUES = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 2, 3, 1 << 31, 1 << 63, -(1 << 63), HUGE_INTEGER, 1e400, -1e400, float("nan"), 1e-320, 0.5,
        -0.0, 1e18, "", "x", "1", "forward", "\ud800", "a" * 300, [], [0], [[0]], [[[0]]], [0, 1], [1, 0], [[0, 0], [0, 0]],
        [None], [True], ["x"], {}, {"name": "x"}, {"float32": 1e12}, {"": None}, {"bytes": 0, "consumers": []},
    ]
)  # fmt: skip
CHOICES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5), VALUES, st.sampled_from(["x", "nam", "name", ""])),
                   min_size=1, max_size=3)  # fmt: skip


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested data."""
    found: list[tuple[Any, Any]] = []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found.append((data, key))
        found += _places(value)
    return found


def mutate(data: dict[str, Any], choices: list[tuple[int, int, Any, str]]) -> dict[str, Any]:
    """A copy with some entries replaced, removed, repeated, exchanged or added."""
    data = copy.deepcopy(data)
    for index, action, value, key in choices:
        places = _places(data)
        holder, at = places[index % len(places)]
        other, there = places[(index * 31 + 7) % len(places)]
        if action == 0:
            del holder[at]
        elif action == 1 and isinstance(holder, list):
            holder.insert(at, copy.deepcopy(holder[at]))
        elif action == 2:
            holder[at] = copy.deepcopy(other[there])
        elif action == 3 and isinstance(holder, dict):
            holder[key] = copy.deepcopy(value)
        else:
            holder[at] = copy.deepcopy(value)
        if not data:
            break
    return data


def _json(data: Any) -> str:
    """JSON text also of what `json.dumps` refuses: integers beyond Python's digit limit."""
    return (
        json.dumps(data, default=repr)
        if not _holds_huge(data)
        else json.dumps(_swap(data)).replace('"<huge>"', "1" + "0" * 5000)
    )


def _toml(value: Any) -> str:
    """TOML text of nested data with inline tables; a huge integer as hexadecimal, which has no digit limit."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value if v is not None) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > 1 << 64:
        return hex(abs(value))
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return repr(value) if isinstance(value, (int, float)) else json.dumps(value)


def _holds_huge(data: Any) -> bool:
    return any(type(holder[at]) is int and holder[at] == HUGE_INTEGER for holder, at in _places(data))


def _swap(data: Any) -> Any:
    data = copy.deepcopy(data)
    for holder, at in _places(data):
        if type(holder[at]) is int and holder[at] == HUGE_INTEGER:
            holder[at] = "<huge>"
    return data


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[Any], None]]:
    """Per format a function that loads mutated data from a file and uses the record if there is one."""
    return make_loaders(tmp_path_factory.mktemp("mutated"))


def make_loaders(folder: Any) -> dict[str, Callable[[Any], None]]:
    problem = problem_from_dict(PROBLEM)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    graph = capture(net, torch.empty(4, 4), loss=torch.sum, source={"model": "test"})
    cluster = Cluster.preset("l4:2")
    plan = make_plan(
        problem, [0, 1], planner="best", stage_of_group=[0, 1], replicas=[[0, 1]], shards={"a/forward": {"batch": 1}},
        predicted=Prediction(1.0),
    ).to_dict() | {"groups": [{"name": "a", "modules": ["a"], "ops": ["a"]}, {"name": "b"}]}  # fmt: skip
    whole = price(graph, "a100-80g:2", groups=3, level="op")
    replicated = make_plan(whole, [0] * whole.num_groups, planner="best").to_dict()
    agent = folder / "agent"
    network = PlacerNetwork(NetworkConfig(hidden=4, second=4, layers=1), features=FEATURES)
    save_checkpoint(agent, network, environment="rlplace/Refinement-v0", training={"steps_done": 0}, card="# test\n")
    config = json.loads((agent / "config.json").read_text())

    def load_problem(choices: Any) -> None:
        path = folder / "x.problem.json"
        path.write_text(_json(mutate(PROBLEM, choices)))
        found = Problem.load(path)
        simulate(found, [0] * found.num_groups)
        assert problem_from_dict(problem_to_dict(found)).fingerprint == found.fingerprint

    def load_plan(choices: Any) -> None:
        path = folder / "x.plan.json"
        ordered = {k: v for k, v in plan.items() if k != "stage_of_group"}
        extra = [{}, {"order": [[0], [1, 2]]}, {"priority": [1.0, 2, 3]}, {"microbatches": 2, "order": [[[0, 0]], [[1, 1]]]}]
        path.write_text(_json(mutate(ordered | extra[choices[0][0] % 4], choices)))
        found = PlacementPlan.load(path, problem)
        found.save(path)
        simulate(problem, found)

    def load_graph(choices: Any) -> None:
        path = folder / "x.graph.json"
        path.write_text(_json(mutate(graph_to_dict(graph), choices)))
        price(OpGraph.load(path), cluster, groups=3)

    def load_cluster(choices: Any) -> None:
        read_cluster(mutate(cluster_to_dict(cluster), choices))

    def load_topology(choices: Any) -> None:
        read_cluster(mutate(TOPOLOGY, choices))

    def read_cluster(data: Any) -> None:
        path = folder / "x.toml"
        path.write_text("\n".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in data.items() if v is not None))
        found = Cluster.load(path)
        price(graph, found, groups=3)
        found.save(path)
        assert Cluster.load(path).fingerprint == found.fingerprint

    def load_joined(choices: Any) -> None:
        path = folder / "x.problem.json"
        path.write_text(_json(mutate(JOINED, choices)))
        found = Problem.load(path)
        collective_channels(found.links, range(found.num_devices))
        for kind in ("all_reduce", "broadcast", "all_to_all"):
            assert collective_s(found.links, kind, range(found.num_devices), 1e6) >= 0
        assert simulate(found, [min(1, found.num_devices - 1)] * found.num_groups).peak_memory_bytes is not None
        assert problem_from_dict(problem_to_dict(found)).fingerprint == found.fingerprint

    def load_replicated(choices: Any) -> None:
        path = folder / "x.plan.json"
        way = [{"recompute": [[0], [1]]}, {"optimizer_sharding": True, "replicas": [[0], [1]]}, {"replicas": [[1], [0]]}]
        path.write_text(_json(mutate(replicated | way[choices[0][0] % 3], choices)))
        found = PlacementPlan.load(path, whole)
        found.save(path)
        simulate(*expand(whole, found))
        footprint(whole, found, graph=graph)

    def load_costs(choices: Any) -> None:
        path = folder / "x.cost.json"
        path.write_text(_json(mutate(COSTS_FILE, choices)))
        found = CostTable.load(path)
        seconds = op_times(graph, KINDS["l4"], found)
        assert (seconds >= 0).all() and (seconds < 1e9).all()
        price(graph, cluster, groups=3, costs=found, host="compiled")
        found.save(path)
        assert CostTable.load(path).fingerprint == found.fingerprint

    def load_measurement(choices: Any) -> None:
        path = folder / "x.measure.json"
        path.write_text(_json(mutate(MEASUREMENT_FILE, choices)))
        found = Measurement.load(path)
        found.save(path)
        assert Measurement.load(path) == found
        table = calibrate([found], KINDS["cpu"], holdout=0.5).table
        assert (op_times(graph, KINDS["cpu"], table) >= 0).all()

    def load_agent(choices: Any) -> None:
        (agent / "config.json").write_text(_json(mutate(config, choices)))
        load_checkpoint(agent)

    return {
        "problem": load_problem,
        "plan": load_plan,
        "graph": load_graph,
        "cluster": load_cluster,
        "checkpoint": load_agent,
        "joined problem": load_joined,
        "replicated plan": load_replicated,
        "topology": load_topology,
        "costs": load_costs,
        "measurement": load_measurement,
    }


FORMATS = ("problem", "plan", "graph", "cluster", "checkpoint")
NEWER = ("joined problem", "replicated plan", "topology", "costs", "measurement")


@pytest.mark.parametrize("name", [*FORMATS, *NEWER])
def test_the_files_that_are_mutated_are_good(loaders: dict[str, Callable[[Any], None]], name: str) -> None:
    for variant in range(3):
        loaders[name]([(variant, 3, 1, "version")])


@pytest.mark.parametrize("name", [*FORMATS, *NEWER])
def test_mutated_files_are_read_or_refused_with_one_line(loaders: dict[str, Callable[[Any], None]], name: str) -> None:
    @settings(max_examples=120, derandomize=True, database=None)
    @given(CHOICES)
    def check(choices: Any) -> None:
        try:
            loaders[name](choices)
        except InputError as error:
            assert 0 < len(str(error)) < 600 and "\n" not in str(error)

    check()
