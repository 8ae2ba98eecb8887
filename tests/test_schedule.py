"""A schedule is one record: nothing else spells its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch.distributed.pipelining

from rlplace.errors import InputError
from rlplace.plan.schedule import SCHEDULES, schedule_named

ROOT = Path(__file__).resolve().parent.parent
HOME = {"rlplace/plan/schedule.py", "rlplace/plan/actions.py"}
"""What a schedule is made of."""
OTHER_MEANINGS = {
    "gpipe": {"rlplace/placement/__init__.py"},  # the planner
}


def texts(path: Path) -> list[str]:
    """String constants of a file that are no docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs]


@pytest.mark.slow
def test_names_of_schedules_are_spelled_in_their_home_alone() -> None:
    spelled = {
        (name, str(path.relative_to(ROOT)))
        for folder in ("rlplace", "envs", "agents")
        for path in (ROOT / folder).rglob("*.py")
        for text in texts(path)
        for name in SCHEDULES
        # Of words that mean other things as well, whole constants only; the other names not even in a sentence.
        if text == name or (name not in OTHER_MEANINGS and re.search(rf"\b{name}\b", text))
    }
    elsewhere = {(name, path) for name, path in spelled if path not in HOME | OTHER_MEANINGS.get(name, set())}
    elsewhere = {item for item in elsewhere if not item[1].endswith("untrusted.py")}  # types that a pickle may name
    assert not elsewhere
    assert {name for name, path in spelled if path in HOME} == set(SCHEDULES)


def test_classes_are_torchs() -> None:
    torchs = torch.distributed.pipelining.schedules
    for name in SCHEDULES:
        torch_class = getattr(torch.distributed.pipelining, SCHEDULES[name].torch_class)
        assert issubclass(torch_class, torchs._PipelineSchedule)
        assert torchs.get_schedule_class(name.replace("_", "").replace("zbv", "zbvzerobubble")) is torch_class


@pytest.mark.parametrize(("near", "name"), [("interleaved", "interleaved_1f1b"), ("zero_bubble", "interleaved_zero_bubble")])
def test_names_that_are_none_are_refused_with_the_nearest(near: str, name: str) -> None:
    with pytest.raises(InputError, match=f"unknown schedule '{near}'; did you mean '{name}'"):
        schedule_named(near)
