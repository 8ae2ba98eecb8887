"""A schedule is one record: nothing else spells its name, and the simulators run what a new record says."""

from __future__ import annotations

import ast
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch.distributed.pipelining

from rlplace.plan import PlacementPlan, make_plan
from rlplace.problem.generate import random_problem
from rlplace.schedule import BACKWARD_GATES, FORWARD_GATES, NO_GATES, PIPELINE_SCHEDULES, SCHEDULES, Schedule
from rlplace.simulator import simulate
from rlplace.simulator.reference import simulate_reference

ROOT = Path(__file__).resolve().parent.parent
HOME = {"rlplace/schedule.py", "rlplace/actions.py"}
"""What a schedule is made of; for a new kind of gate with `simulator/stages.py` and its compiled twin, four files."""
OTHER_MEANINGS = {
    "list": {
        "rlplace/comparing/records.py",  # the executor's name
        "rlplace/graph/inputs.py",  # a kind of argument
        "rlplace/simulator/timeline.py",  # the executor's name
    },
    "gpipe": {"rlplace/planners/__init__.py", "rlplace/planners/gpipe.py"},  # the planner
}


def texts(path: Path) -> list[str]:
    """String constants of a file that are no docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs]


def test_names_of_schedules_are_spelled_in_their_home_alone() -> None:
    spelled = {
        (name, str(path.relative_to(ROOT)))
        for folder in ("rlplace", "envs", "agents")
        for path in (ROOT / folder).rglob("*.py")
        for text in texts(path)
        for name in SCHEDULES
        # Of words that mean other things as well, whole constants only; the other names not even in a sentence.
        if text == name or (name in ("1f1b", "zero_bubble") and re.search(rf"\b{name}\b", text))
    }
    elsewhere = {(name, path) for name, path in spelled if path not in HOME | OTHER_MEANINGS.get(name, set())}
    elsewhere = {item for item in elsewhere if not item[1].endswith("training_index.py")}  # types that a pickle may name
    assert not elsewhere
    assert {name for name, path in spelled if path in HOME} == set(SCHEDULES)


@pytest.mark.parametrize(("gates", "backward_first"), list(product((NO_GATES, BACKWARD_GATES, FORWARD_GATES), (False, True))))
def test_both_simulators_run_what_a_new_record_says(
    monkeypatch: pytest.MonkeyPatch, gates: int, backward_first: bool, tmp_path: Path
) -> None:
    monkeypatch.setitem(SCHEDULES, "new", Schedule("new", gates, backward_first))
    rng = np.random.default_rng(0)
    steps = []
    for seed in range(20):
        problem = random_problem(seed, 8, 3, memory_factor=2.0)
        devices = rng.integers(0, 3, 8)
        priority = rng.integers(0, 4, problem.num_ops).astype(np.float64) if seed % 2 else None
        ours = simulate(problem, devices, microbatches=3, schedule="new", priority=priority)
        theirs = simulate_reference(problem, devices, microbatches=3, schedule="new", priority=priority)
        assert ours.step_time_s == theirs.step_time_s
        assert ours.start_s.tobytes() == theirs.start_s.tobytes()
        assert ours.peak_memory_bytes.tolist() == theirs.peak_memory_bytes.tolist()
        steps.append(ours.step_time_s)
    assert len(set(steps)) > 15  # few of them are stuck
    plan = make_plan(problem, devices, planner="by hand", microbatches=3, schedule="new")
    plan.save(tmp_path / "new.plan.json")
    assert PlacementPlan.load(tmp_path / "new.plan.json", problem).schedule == "new"


def test_classes_are_torchs() -> None:
    for name in PIPELINE_SCHEDULES:
        for layout, torch_class in SCHEDULES[name].torch_class.items():
            assert layout in ("one", "loop", "v")
            assert issubclass(
                getattr(torch.distributed.pipelining, torch_class), torch.distributed.pipelining.schedules._PipelineSchedule
            )
