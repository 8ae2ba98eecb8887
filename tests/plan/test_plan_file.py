"""Plan files: version 2 comes back as it was, version 1 means what it meant, and neither is believed unchecked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan import PlacementPlan, Prediction, make_plan
from rlplace.plan.plan import Older, check_plan
from rlplace.plan.strategy import Pipeline, Stage, Strategy
from rlplace.problem.generate import random_problem

PROBLEM = random_problem(3, 6, 4)

FIRST = {
    "format": "rlplace.plan",
    "version": 1,
    "problem": "4a3e",
    "planner": "best",
    "seed": 7,
    "device_of_group": [0, 1, 1],
    "priority": [0.5, 2.0],
    "microbatches": 4,
    "schedule": "1f1b",
    "stage_of_group": [0, 1, 1],
    "replicas": [[0, 1], [2, 3]],
    "recompute": [[0], [2]],
    "optimizer_sharding": True,
    "groups": [{"name": "a"}, {"name": "b", "modules": ["b"], "ops": ["b/linear"]}, {"name": "c"}],
    "predicted": {"step_time_s": 0.5, "feasible": True, "peak_memory_bytes": [1, 2, 3, 4], "mine": 1},
}

OLD = {"replicas", "recompute", "optimizer_sharding"}
TURNS = {"microbatches", "schedule", "stage_of_group"}


def load(data: Any, folder: Path) -> PlacementPlan:
    path = folder / "x.plan.json"
    path.write_text(json.dumps(data))
    return PlacementPlan.load(path)


def same(one: PlacementPlan, other: PlacementPlan) -> None:
    for name in vars(one):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        else:
            assert a == b, name


def test_version_1_means_what_it_meant(tmp_path: Path) -> None:
    plan = load(FIRST, tmp_path)
    assert plan.strategy is None and plan.samples is None
    kept = {"problem", "planner", "seed", "groups"}
    assert {name: getattr(plan, name) for name in kept} == {name: FIRST[name] for name in kept}
    for name in ("device_of_group", "priority"):
        assert getattr(plan, name).tolist() == FIRST[name]
    assert plan.predicted.extra == {"mine": 1}
    assert plan.older == Older(4, "1f1b", (0, 1, 1), ((0, 1), (2, 3)), ((0,), (2,)), True)
    for use in (lambda: plan.save(tmp_path / "again.plan.json"), lambda: check_plan(plan, PROBLEM)):
        with pytest.raises(
            InputError, match="4 micro-batches and schedule 1f1b and replicas and recompute and optimizer_sharding"
        ):
            use()
    plain = load({key: value for key, value in FIRST.items() if key not in OLD | TURNS} | {"replicas": [[3, 1]]}, tmp_path)
    assert plain.older is None and plain.device_of_group.tolist() == [3, 1, 1]  # other names of the same devices
    plain.save(tmp_path / "again.plan.json")
    written = json.loads((tmp_path / "again.plan.json").read_text())
    assert written["version"] == 2
    assert written["strategy"] == {"microbatches": [1], "stages": [{"devices": [0, 1, 2, 3], "mesh": {"branch": 4}}]}
    same(plain, PlacementPlan.load(tmp_path / "again.plan.json"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"replicas": [[0, 1], [0, 2]]}, "different devices"),
        ({"replicas": [[0, 1], [2]]}, "equal length"),
        ({"replicas": [[0]]}, "one entry for each of 2 devices"),
        ({"replicas": None}, "shares the optimizer state between replicas, but the plan has one"),
        ({"recompute": [[0], [0]]}, "distinct groups"),
        ({"recompute": [[9]]}, r"distinct groups in 0\.\.2"),
        ({"stage_of_group": [0]}, "stage_of_group has 1 entries, the plan 3 groups"),
        ({"schedule": "2f2b"}, "unknown schedule '2f2b'"),
        ({"shards": {"a": {"b": 2}}}, "its shards cut single ops, which plans no longer do"),
    ],
)
def test_words_of_older_files_are_checked(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        load(FIRST | changed, tmp_path)


def test_schedules_for_chains_are_read_and_refused_without_a_model(tmp_path: Path) -> None:
    plan = load({key: value for key, value in FIRST.items() if key not in OLD} | {"schedule": "interleaved"}, tmp_path)
    assert plan.older == Older(4, "interleaved_1f1b", (0, 1, 1))
    with pytest.raises(InputError, match="asks for 4 micro-batches and schedule interleaved_1f1b, which placements"):
        check_plan(plan, PROBLEM)


def test_orders_follow_renamed_devices(tmp_path: Path) -> None:
    left_out = {*OLD, "priority", "schedule", "stage_of_group"}
    data = {key: value for key, value in FIRST.items() if key not in left_out}
    plan = load(data | {"microbatches": 1, "order": [[0], [1, 2], []], "replicas": [[2, 0]]}, tmp_path)
    assert plan.order == [[1, 2], [], [0]] and plan.device_of_group.tolist() == [2, 0, 0]


@st.composite
def plans(draw: st.DrawFn) -> PlacementPlan:
    devices = draw(st.lists(st.integers(0, 1), min_size=6, max_size=6))
    how: dict[str, Any] = {}
    if draw(st.booleans()):
        how["priority"] = draw(st.lists(st.floats(-9, 9), min_size=PROBLEM.num_ops, max_size=PROBLEM.num_ops))
    return make_plan(PROBLEM, devices, planner="drawn", seed=draw(st.integers(0, 9)), **how)


@given(plan=plans())
def test_placement_plans_come_back_as_they_were(plan: PlacementPlan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.plan.json"
    plan.save(path)
    again = PlacementPlan.load(path, PROBLEM)
    same(plan, again)
    assert again.fingerprint == plan.fingerprint
    batch = json.loads(path.read_text())["strategy"]["batch"]
    assert batch == PROBLEM.samples_per_microbatch


STRATEGY = Strategy(4, (Pipeline((Stage(("a", "b"), (0, 1), {"shard": 2}, sharding=3),), (2,), (1,)),))


def whole() -> PlacementPlan:
    predicted = Prediction(step_time_s=0.5, feasible=True, host_bytes=(7,), parts={"compute": 0.4})
    nothing = np.zeros(0, dtype=np.int32)
    return PlacementPlan("9c", "agent", 1, nothing, strategy=STRATEGY, source={"cluster": "a100-80g:2"}, predicted=predicted)


def test_whole_strategies_come_back_as_they_were(tmp_path: Path) -> None:
    whole().save(tmp_path / "x.plan.json")
    data = json.loads((tmp_path / "x.plan.json").read_text())
    assert data["question"] == "9c" and "placement" not in data
    assert data["strategy"] == STRATEGY.to_dict()
    same(whole(), PlacementPlan.load(tmp_path / "x.plan.json"))
    with pytest.raises(InputError, match="it is a whole strategy, which places no groups"):
        PlacementPlan.load(tmp_path / "x.plan.json", PROBLEM)


PLACED = {
    "format": "rlplace.plan", "version": 2, "planner": "x", "seed": 0,
    "strategy": {"batch": 8, "microbatch": [2], "microbatches": [2],
                 "stages": [{"devices": [0, 1, 2, 3], "mesh": {"replicate": 2, "branch": 2}}]},
    "placement": {"problem": "4a", "device_of_group": [0, 1]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "changed", "reason"),
    [
        ("strategy", {"batch": 9}, "batch is 9, but 2 replicas of 2 micro-batches of 2 are 8 samples"),
        ("strategy", {"batch": None}, "give both batch and microbatch, or neither"),
        ("strategy", {"microbatches": [2, 2]}, "microbatches: expected a list of 1 to 1"),
        ("strategy", {"schedule": "2f2b"}, "unknown schedule '2f2b'"),
        ("strategy", {"stages": [{"devices": [0, 1], "mesh": {"tensor": 2}}]}, "has the axes replicate or shard, and branch"),
        ("strategy", {"stages": [{"devices": [0, 1], "mesh": {"branch": 3}}]}, "a mesh of 3 devices, found 2"),
        ("strategy", {"stages": [{"devices": [0, 1], "mesh": {"shard": 2}}]}, "sharding level 0 with shard 2"),
        ("strategy", {"stages": [{"devices": list(range(4)), "mesh": {"replicate": 2, "shard": 2}}]}, "share the optimizer"),
        ("strategy", {"pipelines": []}, "unknown key 'pipelines'"),
        ("placement", {"order": [[0]], "priority": [1.0]}, "order excludes priority and schedule"),
        ("placement", {"device_of_group": [-1]}, r"device_of_group\[0\]: expected a whole number in 0.."),
        ("placement", {"replicas": [[0]]}, "unknown key 'replicas'"),
    ],
)
def test_placements_that_contradict_themselves_are_refused(
    part: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert load(PLACED, tmp_path).older == Older(2, replicas=((0, 1), (2, 3)))
    with pytest.raises(InputError, match=reason):
        load({**PLACED, part: {**PLACED[part], **changed}}, tmp_path)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"question": None}, "key 'question' is missing"),
        ({"placement": PLACED["placement"]}, "leave question out"),
        ({"strategy": {"batch": 3}}, "strategy: key 'stages' is missing"),
        ({"strategy": None}, "plan: strategy: expected an object"),
        ({"version": 3}, "version 3, this rlplace reads up to 2"),
    ],
)
def test_strategies_of_a_file_are_checked(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        load({**whole().to_dict(), **changed}, tmp_path)
