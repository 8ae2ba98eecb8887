"""``rlplace finetune``: what it refuses, learning from a file, and a live campaign under a real torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplace.agents.checkpoint import load_checkpoint
from rlplace.cli.main import main
from rlplace.measured.store import TrialStore

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "finetune"
MODEL = "zoo:moe_toy,width=64,layers=2,experts=4"
LIVE = [MODEL, "--batch", "8", "--granularity", "12", "--cluster", "lab.toml", "--replay", "lab_true.toml", "--repeats", "2"]
LIVE += ["--calls", "256", "--fit-steps", "40", "--rehearse", "1", "--measurements", "m.sqlite", "--out", "tuned"]


def launch(folder, *words, plans):
    """A live campaign on three processes; returns the running job."""
    for name in ("lab.toml", "lab_true.toml"):
        (folder / name).write_text((EXAMPLES / name).read_text())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "rlplace", "finetune", *LIVE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, "--plans", str(plans), *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def measured(path):
    if not path.exists():
        return []
    with TrialStore(path) as store:
        return store.trials(include_running=True)


@pytest.mark.slow
def test_a_campaign_is_interrupted_goes_on_and_teaches(tmp_path, capsys, monkeypatch):
    path = tmp_path / "m.sqlite"
    job = launch(tmp_path, plans=12)
    try:
        deadline = time.monotonic() + 120
        while len([trial for trial in measured(path) if trial.timed]) < 3 and time.monotonic() < deadline:
            time.sleep(0.3)
        os.killpg(job.pid, signal.SIGINT)
        _, err = job.communicate(timeout=90)
    finally:
        job.kill()
    assert "the same command goes on from there" in err, err
    before = measured(path)
    assert len(before) >= 3 and all(trial.timed for trial in before)  # nothing was lost, nothing is half done

    job = launch(tmp_path, "--json", "--report", "report.md", "--best-plan", "best.plan.json", plans=12)
    try:
        out, err = job.communicate(timeout=240)
    finally:
        job.kill()
    assert job.returncode == 0, err
    found = json.loads(out)
    trials = measured(path)
    assert trials[: len(before)] == before
    own = [trial for trial in trials if not trial.anchor]
    assert len(own) == 12 == found["plans"] and len({trial.device_of_group for trial in own}) == 12
    # Box b sleeps twice as long as it is described to, the others as described; how exactly that is found is a matter of time.
    factors = found["device_factors"]
    assert factors["b"] > factors["a"]
    assert found["best_step_s"] <= found["untuned_step_s"] * 1.1
    assert json.loads((tmp_path / "best.plan.json").read_text())["device_of_group"] == found["device_of_group"]
    assert "error of predicted step times" in (tmp_path / "report.md").read_text()
    tuned = load_checkpoint(tmp_path / "tuned")
    assert [line["name"] for line in tuned.training["lineage"]] == ["default"]

    monkeypatch.chdir(tmp_path)
    words = ["--measurements", "m.sqlite", "--agent", "tuned", "--out", "again", "--method", "both", "--fit-steps", "40"]
    assert main(["finetune", *words, "--rehearse", "1", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plans"] == 12 and again["rehearsed_cases"] == 1
    assert [line["name"] for line in load_checkpoint(tmp_path / "again").training["lineage"]] == ["default", "tuned"]
    assert main(["finetune", *words[:2], "--agent", "tuned", "--out", "tuned"]) == 2
    assert "give the new one another folder" in capsys.readouterr().err
