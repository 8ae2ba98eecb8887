"""``--residual`` and ``--from``: what runs elsewhere say of a plan here."""

import contextlib
import json
import sys

import pytest
from command import run as command
from test_finetune import MODEL, WORKER

from rlplace.agents.residual import train_residual
from rlplace.measured.log import read_runs


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A session's runs, exported, and a residual that was trained on them; every step took twice what it should."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "worker.py").write_text(WORKER)
    from rlplace.cli.main import main

    launch = f"{sys.executable} {folder}/worker.py {{plan}} {{timings}}"
    words = ["finetune", MODEL, "--cluster", "a100-40g:2", "--batch", "32", "--launch", launch, "--time-limit", "1"]
    log, shared = str(folder / "lab.runs.jsonl"), folder / "shared.runs.jsonl"
    with contextlib.chdir(folder):  # the worker writes where it runs
        assert main([*words, "--log", log, "--runs", "3", "--export-runs", str(shared)]) == 0
    residual = train_residual(read_runs(shared), members=2, steps=120, hidden=8)
    residual.save(folder / "residual", training={}, card="# Residual\n")
    return folder


PLACE = ("place", MODEL, "--batch", "32", "--calls", "200")


def test_both_figures_are_shown(elsewhere, capsys):
    code, out, err = command(capsys, *PLACE, "--cluster", "a100-40g:2", "--residual", elsewhere / "residual", "--json")
    assert code == 0, err
    predicted = json.loads(out)["predicted"]
    about = predicted["residual"]
    assert about["step_time_s"] == pytest.approx(2 * predicted["step_time_s"], rel=0.3) and about["strange"] is None
    code, out, _ = command(capsys, *PLACE, "--cluster", "a100-40g:2", "--residual", elsewhere / "residual")
    assert code == 0 and "corrected by residual" in out and "rely on it little" not in out


def test_a_cluster_that_is_far_is_said_to_be(elsewhere, capsys):
    code, out, _ = command(capsys, *PLACE, "--cluster", "l4:2", "--residual", elsewhere / "residual")
    assert code == 0 and "rely on it little: no run on l4 was ever seen" in out


def test_what_does_not_go_together_is_refused(elsewhere, capsys, tmp_path):
    code, _, err = command(capsys, *PLACE, "--cluster", "l4:2", "--residual", tmp_path / "none")
    assert code == 2 and "is no folder" in err
    code, _, err = command(capsys, *PLACE, "--cluster", "l4:2", "--residual", elsewhere / "residual", "--space", "placement")
    assert code == 2 and "--residual is for whole strategies" in err


@pytest.mark.slow
def test_a_session_learns_from_the_runs_of_others(elsewhere, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch = f"{sys.executable} {elsewhere}/worker.py {{plan}} {{timings}}"
    words = ["finetune", MODEL, "--cluster", "a100-40g:2", "--batch", "32", "--launch", launch, "--time-limit", "1"]
    others = ["--residual", elsewhere / "residual", "--from", elsewhere / "shared.runs.jsonl"]
    code, _, err = command(capsys, *words, *others, "--runs", "1", "--log", "mine.runs.jsonl")
    assert code == 0, err
    assert command(capsys, *words, "--runs", "1", "--log", "plain.runs.jsonl")[0] == 0
    mine, plain = (read_runs(f"{name}.runs.jsonl")[0] for name in ("mine", "plain"))  # before anything ran here
    assert mine.expected_s / mine.predicted_s > 1.5 * plain.expected_s / plain.predicted_s
    (tmp_path / "bad.runs.jsonl").write_text("{}\n")
    code, _, err = command(capsys, *words, "--residual", elsewhere / "residual", "--from", "bad.runs.jsonl")
    assert code == 2 and "header" in err
