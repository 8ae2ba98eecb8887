"""Bad arguments and models of one's own on the command line: one line each, the right exit code, a clean stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import run

MODELS = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x):
        print("hello from forward")
        return self.b(self.a(x)).sum()

class Reads(Net):
    def forward(self, x):
        return self.b(x).sum() if self.a(x).sum().item() > 0 else self.a(x).sum()

def good(batch):
    return Net(), torch.zeros(batch, 4)

def reads(batch):
    return Reads(), torch.zeros(batch, 4)

def shape(batch):
    return Net(), torch.zeros(batch, 5)

def exits():
    sys.exit(5)
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return str(path)


def test_what_a_model_prints_is_no_result(capsys: pytest.CaptureFixture[str], models: str) -> None:
    code, out, err = run(capsys, "place", f"{models}:good", "--cluster", "l4:2", "--planner", "best", "--json")
    assert code == 0 and json.loads(out)["planner"] == "best" and "hello from forward" in err


def test_capture_that_changes_its_method_is_quiet(capfd: pytest.CaptureFixture[str], models: str) -> None:
    code, _, err = run(capfd, "place", f"{models}:reads", "--cluster", "l4:2", "--planner", "best")
    assert code == 0 and "def forward" not in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("shape", 1, "same reduction dim"), ("exits", 2, "SystemExit"), ("goood", 2, "did you mean 'good'")],
)
def test_models_that_fail(models: str, name: str, code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlplace.cli.main", "place", f"{models}:{name}", "--cluster", "l4:2", "--planner", "best"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code and done.stdout == ""
    assert "Traceback" not in done.stderr and words in done.stderr.splitlines()[-1]
    assert name != "shape" or "models.py" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]])
def test_stdout_that_is_full(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rlplace.cli.main", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "No space left" in done.stderr
