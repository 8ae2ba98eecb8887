"""Reading and writing files: sizes, devices, links and paths that nobody expects."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from rlplace.agents.checkpoint import read_tensors
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import MAX_FILE_BYTES, read_json, read_text, write_json
from rlplace.plan import PlacementPlan
from rlplace.plan.plan import make_plan
from rlplace.problem.generate import random_problem


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as stream:
        stream.truncate(2 * MAX_FILE_BYTES)
    with pytest.raises(InputError, match="the limit is"):
        read_text(path)
    with pytest.raises(InputError, match="the limit is"):
        read_tensors(path)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/", "nowhere.json", "a\0b", ""])
def test_what_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(InputError) as raised:
        read_json(path, "rlplace.plan", 1)
    assert "\n" not in str(raised.value) and "\0" not in str(raised.value)


@pytest.mark.parametrize("depth", [50, 500, 900, 5000, 200_000])
def test_deep_nesting_is_refused_or_survives_the_way_back(tmp_path: Path, depth: int) -> None:
    problem = random_problem(0, num_groups=3, num_devices=1)
    plan = make_plan(problem, [0, 0, 0], planner="single").to_dict()
    text = json.dumps(plan | {"source": {"x": "<deep>"}}).replace('"<deep>"', "[" * depth + "]" * depth)
    path = tmp_path / "p.plan.json"
    path.write_text(text)
    try:
        plan_again = PlacementPlan.load(path)
        plan_again.save(tmp_path / "again.plan.json")
    except InputError as error:
        assert "nested too deeply" in str(error) and depth > 50
    assert sorted(os.listdir(tmp_path)) in (["p.plan.json"], ["again.plan.json", "p.plan.json"])


@pytest.mark.parametrize("data", [{"x": float("nan")}, {"x": object()}])
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, data: dict[str, object]) -> None:
    with pytest.raises((InputError, TypeError, ValueError)):
        write_json(tmp_path / "x.json", data)
    assert not os.listdir(tmp_path)


def test_values_in_messages_are_short() -> None:
    assert show("5") == "'5'" and show(5) == "5"
    for value in (10**5000, [10**5000], ["x" * 10**6] * 100, "x\ny" * 1000):
        assert len(show(value)) <= 80 and "\n" not in show(value)
    for name in (None, 5, [], "x" * 10**6, 10**5000, {}):
        assert len(str(unknown_name("planner", name, ["best", "agent"]))) < 150


def test_a_plan_takes_lists() -> None:
    problem = random_problem(0, num_groups=3, num_devices=2)
    plan = make_plan(problem, [0, 1, 0], planner="mine", priority=list(range(problem.num_ops)), stage_of_group=[0, 1, 0])
    assert isinstance(plan.priority, np.ndarray) and isinstance(plan.stage_of_group, np.ndarray)
    with pytest.raises(InputError, match="stage_of_group"):
        make_plan(problem, [0, 1, 0], planner="mine", stage_of_group=[0])
