"""Plan files come back as they were, and are not believed unchecked."""

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
from rlplace.plan.strategy import Pipeline, Stage, Strategy
from rlplace.problem.generate import random_problem

PROBLEM = random_problem(3, 6, 4)


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


def test_files_of_version_1_are_refused(tmp_path: Path) -> None:
    first = {"format": "rlplace.plan", "version": 1, "problem": "4a3e", "planner": "best", "seed": 7, "device_of_group": [0, 1]}
    with pytest.raises(InputError, match="a file of version 1, which is no longer read; plan again: rlplace place MODEL"):
        load(first, tmp_path)


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
    "strategy": {"batch": 8, "microbatch": [8], "microbatches": [1],
                 "stages": [{"devices": [0, 1], "mesh": {"branch": 2}}]},
    "placement": {"problem": "4a", "device_of_group": [0, 1]},
}  # fmt: skip
ANOTHER = "a placement is one pass over one stage with devices 0 to 1 on its axis branch, and this is another; plan again"


@pytest.mark.parametrize(
    ("part", "changed", "reason"),
    [
        ("strategy", {"batch": 9}, ANOTHER),
        ("strategy", {"batch": None}, ANOTHER),
        ("strategy", {"microbatches": [2]}, ANOTHER),
        ("strategy", {"schedule": "1f1b"}, ANOTHER),
        ("strategy", {"stages": [{"devices": [0, 1], "mesh": {"branch": 2}, "sharding": 1}]}, ANOTHER),
        ("strategy", {"stages": [{"devices": [0, 1, 2, 3], "mesh": {"replicate": 2, "branch": 2}}]}, ANOTHER),
        ("strategy", {"stages": [{"devices": [1, 0], "mesh": {"branch": 2}}]}, ANOTHER),
        ("placement", {"order": [[0]], "priority": [1.0]}, "order excludes priority"),
        ("placement", {"device_of_group": [-1]}, r"device_of_group\[0\]: expected a whole number in 0.."),
        ("placement", {"device_of_group": [4096]}, r"device_of_group\[0\]: expected a whole number in 0..4095"),
        ("placement", {"device_of_group": [0, 2]}, "devices 0 to 2 on its axis branch, and this is another"),
        ("placement", {"shards": {"a": {"b": 2}}}, "unknown key 'shards'"),
        ("placement", {"replicas": [[0]]}, "unknown key 'replicas'"),
    ],
)
def test_placements_that_contradict_themselves_are_refused(
    part: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert load(PLACED, tmp_path).samples == 8
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
