"""The trials of models: the net catches what is wrong, whatever way it is wrong; today's plans of some models run right."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

import rlplace
from benchmarks.groups import run_jobs
from benchmarks.trials.__main__ import FEW, _place, _warm, judged
from benchmarks.trials.collection import OWN, trials
from benchmarks.trials.step import Case, Plain, compare, equal, missing
from rlplace.errors import InputError

ROOT = Path(__file__).resolve().parents[2]

MINE = """
import torch
from torch import nn

def _help(batch=8):
    return 3

def count():
    return 4

def needs(width):
    return nn.Linear(width, 1), torch.zeros(8, 1)

def linear(batch=8):
    return nn.Linear(4, 1), torch.randn(batch, 4), lambda output: output.square().mean()
"""


@cache
def of(theme):
    return {one.name: one for one in trials([OWN / f"{theme}.py"])}


def test_the_models_of_a_users_file_are_its_functions_that_return_one(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    assert [one.name for one in trials([tmp_path])] == ["linear"]
    model, inputs, loss = trials([tmp_path / "mine.py"])[0].make(0, 8)
    assert loss(model(*inputs)).shape == ()
    (tmp_path / "mine.py").write_text("x = 1")
    with pytest.raises(InputError, match="no function"):
        trials([tmp_path])


def test_a_loop_over_parts_is_the_whole_where_the_loss_is_a_mean_and_not_where_it_couples():
    for name, alike in (("focal", True), ("simclr", False)):
        one = of("losses")[name]
        inputs = one.make(100, 8)[1]
        whole, parts = Plain(one, 8), Plain(one, 8, replicas=2, passes=2, own=1)
        losses = [one.step(inputs) for one in (whole, parts)]
        assert (abs(losses[0] - losses[1]) < 1e-5) == alike
        gradients = [next(one.model.parameters()).grad for one in (whole, parts)]
        assert torch.allclose(*gradients, atol=1e-5) == alike


def test_a_parameter_that_no_process_holds_is_missed_by_all_of_its_names():
    tied = of("transformers_by_hand")["tied_embeddings"]
    names = {name for name, _ in tied.make(0, 8)[0].named_parameters(remove_duplicate=False)}
    assert missing(tied, 8, names - {"token.weight"}) == []
    assert missing(tied, 8, names - {"token.weight", "head.weight"}) == ["token.weight"]


def _work(job):
    if job == "hang":
        time.sleep(100)
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "refuse":
        raise InputError("no")
    if job == "fail":
        raise ValueError("bad") from KeyError("the cause")
    return {"pid": os.getpid()}


@pytest.mark.slow
def test_what_hangs_dies_or_fails_is_reported_and_the_next_job_runs():
    jobs = ["well", "refuse", "well", "hang", "die", "fail", "well"]
    found = list(run_jobs(_work, jobs, 2, 3.0))
    assert [one[0].get("error") for one in found] == [None, "InputError", None, "Hang", "Died", "KeyError", None]
    assert all(one["refused"] for one in found[1]) and found[0] == found[2]


def _off(model, plan, **options):
    """Returns a wrong `distribute`: a copy on every process that learns half as fast, and does not have its last parameter."""
    model.register_forward_hook(lambda module, given, output: output / 2 + output.detach() / 2)
    model.register_parameter("other", torch.nn.Parameter(torch.zeros(())))
    return model


def _fresh(*words):
    """Runs Python in a process of its own: one whose autograd has had threads cannot be forked."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def _catch_a_wrong_gradient(path):
    _warm()
    one = of("losses")["simclr"]
    case = Case(one, "replicas", path, 8)
    assert _place(case)["code"] == 0
    right, rlplace.distribute = rlplace.distribute, _off
    (results,) = run_jobs(compare, [case], 2, 60.0)
    row = judged(case, results)
    assert row.status == "WRONG" and "gradient" in row.reason, row
    rlplace.distribute = right
    (results,) = run_jobs(compare, [case], 2, 60.0)
    assert judged(case, results).status == "noted"
    assert not equal(results[0]["figures"][0], 1.0) and equal(results[0]["figures"][1], 1.0)


@pytest.mark.slow
def test_a_wrong_gradient_is_caught(tmp_path):
    done = _fresh(__file__, str(tmp_path / "p.plan.json"))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_some_models_train_as_planned_like_themselves():
    found = trials()
    assert len({one.name for one in found}) == len(found) >= 100
    done = _fresh("-m", "benchmarks.trials", "--few", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["model"] for row in rows} == {*FEW}, done.stderr[-2000:]
    assert [row for row in rows if row["status"] in ("WRONG", "broken")] == [] and done.returncode == 0
    assert sum(row["status"] == "equal" for row in rows) > len(rows) / 2


if __name__ == "__main__":
    _catch_a_wrong_gradient(sys.argv[1])
