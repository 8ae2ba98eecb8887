"""The example scripts: what makes them distributed, and that two processes compute what one does."""

import ast
import difflib
import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import rlplace
from tests.runtime.job.launch import forked

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
PAIRS = ("train_plain", "train_trainer", "train_accelerate")
TIMEOUT_S = 900
TOLERANCE = 1e-5
"""Of losses, which are between 2 and 5; parameters of Adam differ by more where gradients are near 0."""


def code_lines(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    lines = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    return [line for line in lines if line.strip()]


def changes(name):
    before, after = code_lines(name), code_lines(f"{name}_distributed")
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(before[a:b], after[c:d]) for kind, a, b, c, d in codes if kind != "equal"]


@pytest.mark.parametrize("name", PAIRS)
def test_at_most_five_lines_make_a_script_distributed(name):
    found = changes(name)
    assert 1 <= sum(len(after) for _, after in found) <= 5
    for before, after in found:
        assert len(before) <= len(after), f"a line was removed: {before}"


@pytest.mark.parametrize("name", PAIRS)
def test_the_documentation_shows_the_difference(name):
    page = (ROOT / "docs/runtime.md").read_text()
    for before, after in changes(name):
        for line in [f"-{line}" for line in before] + [f"+{line}" for line in after]:
            assert line in page


def single(name, folder, monkeypatch, capsys):
    """Runs a script of one device in this process; what it printed."""
    monkeypatch.chdir(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        importlib.import_module(name).main()
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


def distributed(name, folder, processes=2):
    """Runs a script as torchrun does; what rank 0 printed."""
    code, out, error = forked(processes, EXAMPLES / f"{name}.py", cwd=folder, timeout_s=TIMEOUT_S)
    assert code == 0, error[-5000:]
    return out[0]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """An empty folder for each of the two runs, and the examples on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path / "one", tmp_path / "two"


def save_plan(name, folder):
    model, inputs = importlib.import_module(name).example()
    plan = rlplace.place(model, "cpu:2", planner="metis", example_inputs=inputs)
    assert len(set(plan.device_of_group.tolist())) == 2
    plan.save(folder / f"{name}.plan.json")


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.slow
def test_plain_loop(folders, monkeypatch, capsys):
    """Under a whole strategy: a pipeline, whose last batch of an epoch is shorter and whose evaluation is longer."""
    one, two = folders
    model, inputs = importlib.import_module("train_plain").example()
    plan = rlplace.place(model, "cpu:2", batch=16, space="pipeline=2", example_inputs=inputs)
    assert len(plan.strategy.stages) > 1 and plan.strategy.batch == 16
    plan.save(two / "train_plain.plan.json")
    expected = numbers(single("train_plain", one, monkeypatch, capsys))
    found = numbers(distributed("train_plain_distributed", two))
    assert len(expected) == 18
    assert found == pytest.approx(expected, abs=TOLERANCE)
    model = importlib.import_module("train_plain").Model()
    optimizer = torch.optim.AdamW(model.parameters())
    assert rlplace.load_checkpoint(two / "train_plain", model, optimizer).step == 16
    saved = torch.load(one / "train_plain.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, saved["model"][name], atol=1e-4, rtol=1e-4)
    for number, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(values, saved["optimizer"]["state"][number], atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.slow
def test_accelerate_loop(folders, monkeypatch, capsys):
    one, two = folders
    save_plan("train_plain", two)
    expected = numbers(single("train_accelerate", one, monkeypatch, capsys))
    found = numbers(distributed("train_accelerate_distributed", two))
    assert len(expected) == 16
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert_same_weights(one / "train_accelerate", two / "train_accelerate")


@pytest.mark.slow
def test_trainer(folders, monkeypatch, capsys):
    one, two = folders
    save_plan("train_trainer", two)
    single("train_trainer", one, monkeypatch, capsys)
    distributed("train_trainer_distributed", two)
    expected, found = (
        json.loads((folder / "train_trainer/checkpoint-10/trainer_state.json").read_text())["log_history"] for folder in folders
    )
    assert len(expected) == len(found) == 12
    for a, b in zip(expected, found, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
            assert b.get(key) == pytest.approx(a.get(key), abs=TOLERANCE)
    for folder in ("", "checkpoint-5", "checkpoint-10"):
        assert_same_weights(one / "train_trainer" / folder, two / "train_trainer" / folder)
    states = [torch.load(folder / "train_trainer/checkpoint-5/optimizer.pt") for folder in folders]
    assert [group["params"] for group in states[0]["param_groups"]] == [group["params"] for group in states[1]["param_groups"]]
    for key, values in states[0]["state"].items():
        torch.testing.assert_close(states[1]["state"][key], values, atol=1e-5, rtol=1e-4)


def assert_same_weights(one, two):
    from safetensors.torch import load_file

    expected, found = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.long
@pytest.mark.slow
def test_measured_environment_rewards_real_step_times(tmp_path):
    first = distributed("measured_environment", tmp_path)
    assert first.count("best plan") == 4 or "the budget is spent" in first
    plans = int(re.search(r"^(\d+) plans measured", first, re.MULTILINE)[1])
    assert 4 <= plans <= 20
