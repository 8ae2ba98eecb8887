"""A schedule is one record: nothing else spells its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch.distributed.pipelining

from rlplace.errors import InputError
from rlplace.plan.file import plan_from_dict
from rlplace.schedule import SCHEDULES, schedule_named

ROOT = Path(__file__).resolve().parent.parent
HOME = {"rlplace/schedule.py", "rlplace/actions.py"}
"""What a schedule is made of."""
OTHER_MEANINGS = {
    "gpipe": {"rlplace/planners/__init__.py"},  # the planner
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


@pytest.mark.parametrize(
    ("old", "devices", "stages", "now"),
    [
        ("interleaved", [0, 1, 0, 1], [0, 1, 2, 3], "interleaved_1f1b"),
        ("zero_bubble", [0, 1, 1, 2], None, "interleaved_zero_bubble"),
        ("zero_bubble", [0, 1, 0, 1], [0, 1, 2, 3], "interleaved_zero_bubble"),
        ("zero_bubble", [1, 0, 0, 0, 1], [0, 1, 1, 2, 3], "zbv"),
        ("zero_bubble", [1, 1, 0, 0], [3, 0, 2, 1], "zbv"),
        ("zero_bubble", [0, 0], [0, 1], "interleaved_zero_bubble"),  # one device is both, and was a loop
        ("1f1b", [0, 1], None, "1f1b"),
    ],
)
def test_old_names_in_files_mean_what_they_meant(old: str, devices: list[int], stages: list[int] | None, now: str) -> None:
    data = {"problem": "0" * 64, "planner": "by hand", "seed": 0, "device_of_group": devices, "schedule": old}
    older = plan_from_dict(data if stages is None else data | {"stage_of_group": stages}).older
    assert older is not None and older.schedule == now


@pytest.mark.parametrize(("old", "now"), [("interleaved", "interleaved_1f1b"), ("zero_bubble", "interleaved_zero_bubble")])
def test_old_names_elsewhere_are_refused_with_the_new(old: str, now: str) -> None:
    with pytest.raises(InputError, match=f"unknown schedule '{old}'; did you mean '{now}'"):
        schedule_named(old)
