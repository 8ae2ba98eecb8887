"""Files that several verbs are given."""

from pathlib import Path

import pytest

from rlplace.plan import make_plan
from rlplace.problem.generate import random_problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A problem, two plans of it and one of another."""
    folder = tmp_path_factory.mktemp("files")
    problem = random_problem(0, num_groups=8, num_devices=2)
    problem.save(folder / "x.problem.json")
    for name, devices in (("one", [0, 0, 0, 0, 1, 1, 1, 1]), ("two", [0, 0, 1, 1, 1, 1, 1, 1])):
        make_plan(problem, devices, planner=name).save(folder / f"{name}.plan.json")
    foreign = random_problem(1, num_groups=8, num_devices=2)
    make_plan(foreign, [0] * 8, planner="test").save(folder / "foreign.plan.json")
    return folder
