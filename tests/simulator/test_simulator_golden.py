"""Whole timelines on file: both simulators must still give them to the last bit.

``python tests/simulator/test_simulator_golden.py`` writes the files anew from the reference; a change of theirs is a change
of what "step time" means and needs a reason in the changelog.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.generate import random_problem
from rlplace.simulator import Timeline, simulate
from rlplace.simulator.reference import simulate_reference

FOLDER = Path(__file__).resolve().parent.parent / "golden"
CASES: dict[str, dict[str, Any]] = {
    "layered": {"shape": "layered", "num_devices": 4, "memory_factor": 1.2, "comm_ratio": 1.0},
    "branchy_two_hosts": {"shape": "branchy", "num_devices": 4, "hosts": 2, "unlike": True, "shared_parameters": 3},
    "chain_inference": {"shape": "chain", "num_devices": 2, "training": False, "comm_ratio": 2.0},
}


def _plain(line: Timeline) -> dict[str, Any]:
    found = {item.name: getattr(line, item.name) for item in dataclasses.fields(line)}
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("run", [simulate, simulate_reference], ids=["fast", "reference"])
def test_timeline_is_the_one_on_file(name: str, run: Any) -> None:
    data = json.loads((FOLDER / f"timeline_{name}.json").read_text())
    line = run(problem_from_dict(data["problem"]), data["device_of_group"])
    assert json.loads(json.dumps(_plain(line))) == data["timeline"]


def _write() -> None:
    for number, (name, options) in enumerate(CASES.items()):
        problem = random_problem(number, 10, **options)
        plan = np.random.default_rng(number).integers(0, problem.num_devices, 10).tolist()
        timeline = _plain(simulate_reference(problem, plan))
        data = {"problem": problem_to_dict(problem), "device_of_group": plan, "timeline": timeline}
        (FOLDER / f"timeline_{name}.json").write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    _write()
