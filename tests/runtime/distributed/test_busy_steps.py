"""A watch that is given the distributed model: busy seconds of all processes, brought together after some of the steps."""

import json

import pytest
from busy_worker import EVERY, watched
from launch import run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("busy")
    return folder, run(2, watched, str(folder))


def test_every_process_takes_part_and_rank_0_decides(found):
    folder, (first, second) = found
    assert first["drifts"] == 1 and second["drifts"] == 0
    assert second["told"] == [] and second["asked"] == []
    assert {"forward", "backward"} <= set(first["kinds"])
    assert len(set(first["losses"])) == 1 and first["losses"] == second["losses"]
    lines = [json.loads(line) for line in (folder / "run.steps.jsonl").read_text().splitlines()]
    busy = [line for line in lines if "busy_s" in line]
    steps = [line for line in lines if "s" in line]
    assert len(busy) == len(steps) // EVERY
    assert all(len(line["busy_s"]) == 2 for line in busy)


def test_the_background_process_is_told_where(found):
    _, (first, _) = found
    (how,) = first["asked"]
    assert how["busy_before_s"] == pytest.approx([0.1, 0.2])
    assert how["busy_s"] == pytest.approx([0.1, 0.4])
