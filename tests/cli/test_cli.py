"""The command line: verbs, JSON, exit codes, one-line errors, a clean stdout, nothing half written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlplace.agents.checkpoint import save_checkpoint
from rlplace.agents.network import PlacerNetwork
from rlplace.cli.main import main
from rlplace.cli.plan_tables import op_level_line
from rlplace.envs.guide.features import FEATURES
from rlplace.plan import PlacementPlan, Prediction
from rlplace.problem import Problem
from rlplace.problem.build import build_problem
from rlplace.problem.generate import random_problem
from tests.cli.command import run

TINY = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=64"


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    torch.manual_seed(0)
    network = PlacerNetwork(hidden=16, second=8, features=FEATURES)
    save_checkpoint(folder, network, training={"steps_done": 0}, card="# test\n")
    return str(folder)


def test_a_device_is_used_as_far_as_its_own_memory_goes(tmp_path, capsys):
    """50 of 100 bytes on one device and 9 of 10 on the other; shares are of each."""
    path = tmp_path / "two.problem.json"
    times, links = [[1.0, None], [None, 1.0]], {"bandwidth_bytes_per_s": 1.0}
    build_problem("two", time_s=times, memory_bytes=[100, 10], tensors=[], resident_bytes=[50, 9], **links).save(path)
    assert main(["place", str(path), "--planner", "best"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("gpu")]
    assert [(row[0], row[-2:]) for row in rows] == [("gpu0", ["50.0", "%"]), ("gpu1", ["90.0", "%"])]


@pytest.fixture
def problem_file(tmp_path):
    path = tmp_path / "toy.problem.json"
    random_problem(0, num_groups=10, num_devices=2).save(path)
    return str(path)


def last_line(text):
    lines = [line for line in text.splitlines() if line.startswith("rlplace:")]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


@pytest.mark.slow
def test_place_model_with_the_agent(capsys, tmp_path, agent):
    plan_file = tmp_path / "p.plan.json"
    code, out, _ = run(
        capsys, "place", TINY, "--cluster", "a100-80g:4", "--agent", agent, "--time-limit", "0.5", "--seq", "16",
        "--granularity", "20", "--out", str(plan_file), "--json",
    )  # fmt: skip
    assert code == 0
    data = json.loads(out)
    assert data == json.loads(plan_file.read_text())
    assert data["format"] == "rlplace.plan" and data["planner"] == "agent"
    assert data["predicted"]["feasible"] and data["predicted"]["executor"] == "list"
    assert data["predicted"]["step_time_s"] <= data["predicted"]["floor_step_time_s"]
    assert data["predicted"]["op_level"]["step_time_s"] > 0
    assert len(data["groups"]) == len(data["placement"]["device_of_group"]) <= 20
    assert data["source"]["graph"]["model"] == TINY


@pytest.mark.slow
def test_capture_place_simulate(capsys, tmp_path):
    problem_file, plan_file, trace = (str(tmp_path / name) for name in ("x.problem.json", "p.plan.json", "t.json"))
    arguments = ("--cluster", "v100:2", "--seq", "16", "--batch", "4")
    assert run(capsys, "capture", TINY, *arguments, "--out", problem_file)[0] == 0
    assert Problem.load(problem_file).samples_per_microbatch == 4
    code, out, _ = run(capsys, "place", problem_file, "--planner", "best", "--memory", "--out", plan_file)
    assert code == 0 and "step time" in out
    head, *rows = out[out.index("GB    weights") :].splitlines()[:3]
    names, problem = head.split()[1:], Problem.load(problem_file)
    of_rows = [dict(zip(names, map(float, row.split()[1:-1]), strict=False)) for row in rows]
    for row in of_rows:  # parts add up to the total, of which each is rounded
        parts = [value for name, value in row.items() if name not in ("total", "memory")]
        assert sum(parts) == pytest.approx(row["total"], abs=0.0005 * (len(parts) + 1))
        assert row["memory"] == 32.0 and row["context"] == pytest.approx(0.6)
    assert sum(row["weights"] for row in of_rows) == pytest.approx(problem.weight_bytes.sum() / 1e9, abs=0.002)
    assert sum(row["optimizer"] for row in of_rows) == pytest.approx(problem.optimizer_bytes.sum() / 1e9, abs=0.002)
    assert PlacementPlan.load(plan_file, Problem.load(problem_file)).planner == "best"
    code, out, _ = run(capsys, "simulate", problem_file, plan_file, "--trace", trace, "--json")
    assert code == 0 and json.loads(out)["feasible"] is True
    assert json.loads((tmp_path / "t.json").read_text())
    op_file = str(tmp_path / "op.problem.json")
    assert run(capsys, "capture", TINY, *arguments, "--level", "op", "--out", op_file)[0] == 0
    assert Problem.load(op_file).group_names == Problem.load(problem_file).group_names


@pytest.mark.slow
def test_plans_of_the_split_view_simulate_on_their_captured_view(capsys, tmp_path):
    problem_file, plan_file, trace = (str(tmp_path / name) for name in ("x.problem.json", "p.plan.json", "t.json"))
    arguments = (TINY, "--cluster", "v100:2", "--seq", "16", "--batch", "4")
    # A search that the clock cuts may answer differently.
    unhurried = ("--planner", "bipartition", "--time-limit", "120", "--json")
    code, out, _ = run(capsys, "place", *arguments, *unhurried, "--out", plan_file)
    assert code == 0
    predicted = json.loads(out)["predicted"]
    assert run(capsys, "capture", *arguments, "--level", "split", "--out", problem_file)[0] == 0
    code, out, _ = run(capsys, "simulate", problem_file, plan_file, "--json", "--trace", trace)
    assert code == 0
    again = json.loads(out)
    assert again["step_time_s"] == predicted["step_time_s"]
    assert again["peak_memory_bytes"] == predicted["peak_memory_bytes"]
    assert json.loads((tmp_path / "t.json").read_text())
    code, out, _ = run(capsys, "place", problem_file, *unhurried)
    assert code == 0 and json.loads(out)["predicted"]["step_time_s"] == predicted["step_time_s"]


def test_the_finer_simulation_names_devices_that_are_too_small():
    problem = random_problem(3, num_groups=12, num_devices=2, memory_factor=2.0)
    limits = [device.memory_bytes for device in problem.devices]
    fits = op_level_line(Prediction(1.0, feasible=True, peak_memory_bytes=tuple(limits)), problem)
    assert fits == "simulated op by op 1000.000 ms, feasible True"
    over = Prediction(1.0, feasible=False, peak_memory_bytes=(limits[0], limits[1] + 1))
    line = op_level_line(over, problem)
    assert f"{problem.devices[1].name} needs" in line and f"{problem.devices[0].name} needs" not in line


def test_infeasible_plan_simulates_and_says_so(capsys, tmp_path):
    problem = random_problem(3, num_groups=10, num_devices=2, memory_factor=1.05)
    problem.save(tmp_path / "x.problem.json")
    plan = PlacementPlan(problem.fingerprint, "hand", 0, __import__("numpy").zeros(10, dtype="int32"))
    plan.save(tmp_path / "p.plan.json")
    code, out, _ = run(capsys, "simulate", str(tmp_path / "x.problem.json"), str(tmp_path / "p.plan.json"))
    assert code == 0 and "infeasible" in out and "short" in out


def test_info(capsys):
    code, out, _ = run(capsys, "info", "--json")
    data = json.loads(out)
    assert code == 0
    assert set(data) == {"versions", "devices", "planners", "presets", "checkpoints", "environments", "plugins"}
    assert "agent" in data["planners"] and "mi300x" in data["presets"] and "rlplace/Placement-v0" in data["environments"]


@pytest.mark.slow
def test_train_small(capsys, tmp_path):
    folder = tmp_path / "problems"
    folder.mkdir()
    for seed in range(2):
        random_problem(seed, num_groups=8, num_devices=2).save(folder / f"{seed}.problem.json")
    out_folder = str(tmp_path / "run")
    code, out, _ = run(
        capsys,
        "train",
        "--problems",
        str(folder / "0.problem.json"),
        str(folder / "1.problem.json"),
        *("--cases", "3", "--fit-steps", "40", "--steps", "512", "--processes", "1"),
        *("--test", str(folder), "--calls", "16", "--out", out_folder),
    )
    assert code == 0 and "vs best" in out and "16 simulator calls" in out
    code, out, _ = run(
        capsys, "train", "--resume", out_folder, "--steps", "1024", "--test", str(folder), "--calls", "16", "--json"
    )
    assert code == 0
    assert json.loads(out)["steps"] >= 1024


@pytest.mark.slow
def test_model_that_does_not_fit_ends_with_3_and_writes_nothing(capsys, tmp_path):
    plan_file = tmp_path / "p.plan.json"
    big = "hf:gpt2,n_layer=2,n_embd=16384,n_head=16"
    asked = ("place", big, "--cluster", "t4:2", "--seq", "16", "--out", str(plan_file))
    code, out, err = run(capsys, *asked)
    assert code == 3 and out == "" and not plan_file.exists()
    assert "GB on 2 devices together" in last_line(err)
    code, out, err = run(capsys, *asked, "--space", "placement", "--planner", "best")
    assert code == 3 and out == "" and not plan_file.exists()
    line = last_line(err)
    assert "short" in line and "GB" in line


def test_interrupt_is_130(capsys, monkeypatch, problem_file):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlplace.cli.place.PlaceOptions.run", interrupted)
    code, _, err = run(capsys, "place", problem_file)
    assert code == 130 and last_line(err) == "rlplace: interrupted"


def test_debug_shows_the_traceback(problem_file):
    from rlplace.errors import InputError

    with pytest.raises(InputError):
        main(["place", problem_file, "--cluster", "v100:2", "--debug"])


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
    assert code == 0 and json.loads(out)["format"] == "rlplace.plan" and "hello from forward" in err


def test_capture_that_changes_its_method_is_quiet(capfd: pytest.CaptureFixture[str], models: str) -> None:
    code, _, err = run(capfd, "place", f"{models}:reads", "--cluster", "l4:2", "--planner", "best")
    assert code == 0 and "def forward" not in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("shape", 1, "same reduction dim"), ("exits", 2, "SystemExit"), ("goood", 2, "did you mean 'good'")],
)
def test_models_that_fail(capfd: pytest.CaptureFixture[str], models: str, name: str, code: int, words: str) -> None:
    ended, out, err = run(capfd, "place", f"{models}:{name}", "--cluster", "l4:2", "--planner", "best")
    assert (ended, out) == (code, "")
    assert "Traceback" not in err and words in err.splitlines()[-1]
    assert name != "shape" or "models.py" in err.splitlines()[-1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]])
@pytest.mark.slow
def test_stdout_that_is_full(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rlplace.cli.main", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "No space left" in done.stderr


@pytest.mark.parametrize("words", ["", "help"])
def test_no_verb_shows_what_there_is(capsys, words):
    code, out, err = run(capsys, *words.split())
    assert code == 0 and not err
    assert "place" in out and "exit codes" in out


def test_help_of_a_verb_is_its_own_help(capsys):
    code, out, _ = run(capsys, "help", "simulate")
    assert code == 0
    assert run(capsys, "simulate", "--help")[:2] == (0, out)


def test_version_has_a_short_name(capsys):
    assert run(capsys, "-V") == run(capsys, "--version")


def test_completion_script_knows_verbs_and_options(capsys):
    code, script, _ = run(capsys, "--print-completion", "bash")
    assert code == 0 and "finetune" in script and "--time-limit" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
