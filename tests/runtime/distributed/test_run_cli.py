"""``rlplace run`` under a real torchrun, and what it refuses without one."""

import json
import re

import pytest
import torch
from launch import torchrun

from rlplace.cli.main import main
from rlplace.runtime.distributed.job.synthetic import synthetic_batch

MODEL = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=100,n_positions=32"


def place(path, *options, cluster="cpu:2", planner="pipedream"):
    arguments = ["place", MODEL, "--cluster", cluster, "--planner", planner, "--batch", "2", "--seq", "16", "--out", str(path)]
    assert main([*arguments, *options]) == 0


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "p.plan.json"
    place(path, "--microbatches", "2")
    return path


def run_under_torchrun(*arguments):
    return torchrun(2, "-m", "rlplace", "run", *arguments)


def lines_of(stderr):
    return [line for line in stderr.splitlines() if line.startswith("rlplace:")]


def test_trains_and_verifies_under_torchrun(plan):
    code, out, err = run_under_torchrun("--plan", plan, "--steps", 4, "--verify", "--clip", 1.0, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["verified"]["equal"] and found["verified"]["reference"] == "graph"  # gpt2 has dropout
    assert len(found["losses"]) == 4 and found["losses"][-1] < found["losses"][0]
    assert [rank["stage"] for rank in found["ranks"]] == [0, 1]
    assert all(rank["peak_memory_bytes"] > rank["predicted_memory_bytes"] / 4 for rank in found["ranks"])
    assert found["step_time_s"] > 0 and found["predicted_step_time_s"] > 0


@pytest.mark.slow
def test_other_cluster_and_changed_plan(plan, tmp_path):
    code, _, err = run_under_torchrun("--plan", plan, "--cluster", "v100:2")
    assert code == 1
    (line,) = lines_of(err)
    assert re.search(r"the plan is for cluster [0-9a-f]{12} \(cpu:2\), 'v100:2' is [0-9a-f]{12}; plan again", line)
    changed = json.loads(plan.read_text())
    changed["source"]["graph"]["model"] = MODEL.replace("n_layer=2", "n_layer=3")
    other = tmp_path / "other.plan.json"
    other.write_text(json.dumps(changed))
    code, _, err = run_under_torchrun("--plan", other)
    assert code == 1
    (line,) = lines_of(err)
    assert re.search(r"for problem [0-9a-f]{12}, its model and cluster give [0-9a-f]{12}: its graph is another", line)


def test_without_torchrun(plan, capsys, alone, monkeypatch):
    assert main(["run", "--plan", str(plan)]) == 2
    assert f"start it with: torchrun --nproc-per-node 2 -m rlplace run --plan {plan}" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["run", "--plan", str(plan)]) == 2
    assert "uses 2 devices, but there are 3 processes" in capsys.readouterr().err


def test_arguments_that_do_not_go_together(plan, capsys):
    assert main(["run", "--plan", str(plan), "--resume"]) == 2
    assert "--checkpoint DIR" in capsys.readouterr().err
    assert main(["run", "--plan", str(plan.parent / "none.plan.json")]) == 2
    with pytest.raises(SystemExit):
        main(["run", "--plan", str(plan), "--lr", "-1"])


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_plan_of_one_device_needs_no_torchrun(tmp_path, capsys, alone):
    path, folder = tmp_path / "one.plan.json", tmp_path / "checkpoints"
    place(path, cluster="cpu:1", planner="single")
    run = ["run", "--plan", str(path), "--device", "cpu", "--checkpoint", str(folder), "--json"]
    capsys.readouterr()
    assert main([*run, "--steps", "3", "--verify"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["verified"]["equal"]
    assert main([*run, "--steps", "5", "--resume", "--verify"]) == 0
    rest = json.loads(capsys.readouterr().out)
    assert rest["first_step"] == 3 and len(rest["losses"]) == 2 and rest["verified"]["equal"]
    assert main([*run[:-3], "--steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == whole["losses"] + rest["losses"]


def test_a_wrong_gradient_is_found(tmp_path, capsys, alone, monkeypatch):
    from rlplace.runtime.distributed.job import job

    path = tmp_path / "one.plan.json"
    place(path, cluster="cpu:1", planner="single")
    right = job._step

    def wrong(model, *arguments):
        loss = right(model, *arguments)
        dict(model.named_parameters())["transformer.h.1.mlp.c_fc.weight"].grad[0, 0] += 0.01
        return loss

    monkeypatch.setattr(job, "_step", wrong)
    assert main(["run", "--plan", str(path), "--device", "cpu", "--steps", "2", "--verify"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^step 2  loss [\d.]+  [\d.]+ ms$", out, re.MULTILINE)
    assert "predicted GB" in out and "median step time" in out
    assert "NOT EQUAL" in out and "worst gradient transformer.h.1.mlp.c_fc.weight" in out


def test_synthetic_batches_stay_in_range():
    ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    inputs = {"ids": ids, "labels": ids + 100, "mask": torch.arange(12).expand(2, 12) < 7, "scale": torch.tensor(2.0), "n": 3}
    one = synthetic_batch(inputs, 6, seed=1, step=4)
    assert one["ids"].shape == (6, 12)
    assert torch.equal(one["labels"], one["ids"] + 100)  # tokens and labels stay together
    assert torch.equal(one["mask"], inputs["mask"][:1].expand(6, 12))
    assert all(sorted(row.tolist()) in [sorted(r.tolist()) for r in ids] for row in one["ids"])
    assert one["scale"] is inputs["scale"] and one["n"] == 3
    again, next_step = synthetic_batch(inputs, 6, seed=1, step=4), synthetic_batch(inputs, 6, seed=1, step=5)
    assert torch.equal(one["ids"], again["ids"]) and not torch.equal(one["ids"], next_step["ids"])
