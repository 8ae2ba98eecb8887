"""``rlplace run`` and the plan service under a real torchrun, and what is refused without one."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace.cli.main import main
from rlplace.errors import InputError
from rlplace.model.zoo import LoadedModel, load_model
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.runtime.base.steps import synthetic_batch
from rlplace.runtime.job.distribute import check_strategy
from rlplace.runtime.job.measure import PlanTimer
from tests.runtime.job.launch import forked, run, torchrun

MODEL = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=100,n_positions=32"


def place(path, *options, cluster="cpu:2", planner="round_robin"):
    words = f"place {MODEL} --cluster {cluster} --planner {planner} --microbatch 2 --seq 16 --out {path}"
    assert main([*words.split(), *options]) == 0


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "p.plan.json"
    place(path, planner="metis")
    return path


@pytest.mark.slow
def test_trains_and_verifies_under_torchrun(plan):
    code, out, err = torchrun(2, "-m", "rlplace", "run", "--plan", plan, "--steps", 4, "--verify", "--clip", 1.0, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["verified"]["equal"]  # with dropout, and gradients that are clipped
    assert len(found["losses"]) == 4 and found["losses"][-1] < found["losses"][0]
    assert [rank["stage"] for rank in found["ranks"]] == [0, 1]
    assert all(rank["peak_memory_bytes"] > rank["predicted_memory_bytes"] / 4 for rank in found["ranks"])
    assert found["step_time_s"] > 0 and found["predicted_step_time_s"] > 0


@pytest.fixture(scope="module")
def leaves_one_out(tmp_path_factory):
    """A strategy on the devices 0 and 2 of three."""
    path = tmp_path_factory.mktemp("gap") / "p.plan.json"
    words = "place zoo:mlp,layers=4,width=32 --cluster cpu:3 --batch 8 --calls 30 --space"
    assert main([*words.split(), "replicate=2 pipeline=1 shard=1 tensor=1", "--out", str(path)]) == 0
    plan = json.loads(path.read_text())
    (stage,) = plan["strategy"]["stages"]
    stage["devices"] = [0, 2]
    path.write_text(json.dumps(plan))
    return path


@pytest.mark.slow
def test_processes_take_the_devices_that_a_plan_uses(leaves_one_out):
    code, out, err = forked(2, "-m", "rlplace", "run", "--plan", leaves_one_out, "--steps", 2, "--verify", "--json")
    assert code == 0, err
    found = json.loads(out[0])
    assert found["verified"]["equal"] and [rank["stage"] for rank in found["ranks"]] == [0, 2]


@pytest.mark.slow
def test_divided_tables_with_sparse_gradients_verify(tmp_path):
    """From the model to a verified run, as a user with a recommender does."""
    path, model = tmp_path / "p.plan.json", "zoo:dlrm,tables=3,rows=90,width=33,hidden=8,layers=2,sparse=true"
    words = f"place {model} --cluster cpu:2 --batch 8 --optimizer sparse-adam --space tables=2 --calls 20 --out {path}"
    assert main(words.split()) == 0
    code, out, err = forked(2, "-m", "rlplace", "run", "--plan", path, "--steps", 3, "--verify", "--clip", 0.1, "--json")
    assert code == 0, err
    assert json.loads(out[0])["verified"]["equal"] and len(PlacementPlan.load(path).strategy.stages[0].tables) == 3


def test_devices_left_out_must_not_matter(leaves_one_out):
    check_strategy(PlacementPlan.load(leaves_one_out), "run")
    told = json.loads(leaves_one_out.read_text())
    for cluster in ("a100-80g:2,v100:1", "gone.toml"):
        told["source"]["cluster"], told["source"]["cluster_fingerprint"] = cluster, None
        other = leaves_one_out.with_name("other.plan.json")
        other.write_text(json.dumps(told))
        with pytest.raises(InputError, match=r"uses the devices 0, 2, .* other kinds or hosts; plan for a cluster of these"):
            check_strategy(PlacementPlan.load(other), "run")


@pytest.fixture
def of_one(tmp_path, alone):
    """A plan of one device, outside of any job."""
    place(tmp_path / "one.plan.json", cluster="cpu:1", planner="single")
    return tmp_path / "one.plan.json"


@pytest.mark.slow
def test_other_cluster_and_changed_plan(of_one, capsys):
    def refusal(*options):
        assert main(["run", "--plan", str(of_one), "--device", "cpu", *options]) == 2
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rlplace:")]
        return line

    line = refusal("--cluster", "v100:1")
    assert re.search(r"the plan is for cluster [0-9a-f]{12} \(cpu:1\), 'v100:1' is [0-9a-f]{12}; plan again", line)
    changed = json.loads(of_one.read_text())
    changed["source"]["graph"]["model"] = MODEL.replace("n_layer=2", "n_layer=3")
    of_one.write_text(json.dumps(changed))
    line = refusal()
    assert re.search(r"for graph [0-9a-f]{12}, its model gives [0-9a-f]{12}: its graph is another", line)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_host_without_room_for_the_whole_model_trains_and_does_not_verify(tmp_path, alone, capsys):
    size = sum(parameter.nbytes for parameter in load_model(MODEL, batch=1, seq=16).module.parameters())
    small = dataclasses.replace(rlplace.Cluster.preset("cpu:1"), host_memory_bytes=(size - 4,))
    small.save(tmp_path / "small.toml")
    path = tmp_path / "small.plan.json"
    assert (
        main(["place", MODEL, "--cluster", str(tmp_path / "small.toml"), "--batch", "2", "--seq", "16", "--out", str(path)])
        == 0
    )
    assert "build it in rlplace.deferred_weights()" in capsys.readouterr().out
    run = ["run", "--plan", str(path), "--device", "cpu", "--steps", "1"]
    assert main([*run, "--verify"]) == 2
    assert "leave --verify out" in capsys.readouterr().err
    torch.distributed.destroy_process_group()
    assert main(run) == 0


@pytest.mark.slow
def test_a_plan_of_one_device_needs_no_torchrun(of_one, capsys):
    run = ["run", "--plan", str(of_one), "--device", "cpu", "--checkpoint", str(of_one.parent / "checkpoints"), "--json"]
    capsys.readouterr()
    assert main([*run, "--steps", "3", "--verify"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["verified"]["equal"]
    assert main([*run, "--steps", "5", "--resume", "--verify"]) == 0
    rest = json.loads(capsys.readouterr().out)
    assert rest["first_step"] == 3 and len(rest["losses"]) == 2 and rest["verified"]["equal"]
    assert main([*run[:-3], "--steps", "5", "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == whole["losses"] + rest["losses"]


@pytest.mark.slow
def test_a_wrong_gradient_is_found(of_one, capsys, monkeypatch):
    from rlplace.runtime.job import job

    right = job.train_step

    def wrong(model, *args, **options):
        loss = right(model, *args, **options)
        dict(model.named_parameters())["transformer.h.1.mlp.c_fc.weight"].grad[0, 0] += 0.01
        return loss

    monkeypatch.setattr(job, "train_step", wrong)
    assert main(["run", "--plan", str(of_one), "--device", "cpu", "--steps", "2", "--verify"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^step 2  loss [\d.]+  [\d.]+ ms$", out, re.MULTILINE)
    assert "predicted GB" in out and "median step time" in out
    assert "NOT EQUAL" in out and "worst gradient transformer.h.1.mlp.c_fc.weight" in out


def test_synthetic_batches_hold_whole_samples():
    ids = torch.stack([torch.randperm(9) + 100 * column for column in range(3)], dim=1)  # every column has its own range
    inputs = {"ids": ids, "nested": [ids[:, 0] * 7], "mask": ids > 104, "scale": torch.tensor(2.0), "n": 3}
    rows = {tuple(row) for row in ids.tolist()}
    for samples in (4, 9, 20):
        one = synthetic_batch(inputs, samples, seed=1, step=4)
        found = [tuple(row) for row in one["ids"].tolist()]
        counts = [found.count(row) for row in rows]
        assert len(found) == samples == sum(counts) and max(counts) - min(counts) <= 1
        assert torch.equal(one["nested"][0], one["ids"][:, 0] * 7) and torch.equal(one["mask"], one["ids"] > 104)
        assert one["scale"] is inputs["scale"] and one["n"] == 3
        again, next_step = (synthetic_batch(inputs, samples, seed=1, step=step) for step in (4, 5))
        assert torch.equal(one["ids"], again["ids"]) and not torch.equal(one["ids"], next_step["ids"])


RAGGED = {
    "bags": {"offsets": torch.tensor([0, 2, 3, 5]), "values": torch.arange(8), "y": torch.randn(4, 1)},
    "uneven bags": {"offsets": torch.tensor([0, 2, 3, 5]), "values": torch.arange(11)},
    "bags of one": {"values": torch.tensor([7, 3, 5, 1]), "offsets": torch.arange(4)},
    "ends, too": {"x": torch.randn(4, 2), "offsets": torch.tensor([0, 2, 3, 5, 8])},
    "packed": {"padded": torch.randn(4, 6, 2), "lengths": torch.tensor([6, 4, 4, 2])},
}


@pytest.mark.parametrize("name", RAGGED)
def test_samples_keep_their_order_where_it_may_mean_something(name):
    inputs = RAGGED[name]
    for step in range(3):
        batch = synthetic_batch(inputs, 4, seed=0, step=step)
        assert all(torch.equal(batch[key], value) for key, value in inputs.items())
    twice = synthetic_batch(inputs, 8, seed=0, step=0)
    for key, value in inputs.items():  # each half is the example again
        assert torch.equal(twice[key], torch.cat([value, value]) if len(value) == 4 else value)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x):
        return (self.layers(x) ** 2).mean()


def time_all():
    """What this process saw: a plan that runs, one that no engine runs, and one after it."""
    torch.manual_seed(0)
    model = LoadedModel(module=Net(), example_inputs={"x": torch.randn(4, 16)}, loss=lambda output: output, name="net")
    graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss)
    problem = rlplace.price(graph, "cpu:2", groups=4)
    timer, found = PlanTimer(model, torch.device("cpu")), {}
    chain = np.arange(problem.num_groups, dtype=np.int32) * 2 // problem.num_groups
    plan = make_plan(problem, chain, planner="t")
    found["computed"] = timer(plan, problem)
    try:
        timer(dataclasses.replace(plan, device_of_group=chain + 1), problem)
    except InputError as error:
        found["refused"] = str(error)
    found["after"] = timer(plan, problem)
    return found


@pytest.mark.slow
def test_all_ranks_time_a_plan_alike():
    first, second = run(2, time_all)
    for times in ("computed", "after"):
        assert (first[times].step_s, first[times].places) == (second[times].step_s, second[times].places)
    assert len(first["computed"].step_s) == 5 and first["computed"].predicted_s > 0
    assert len(first["computed"].places) == len(first["computed"].peak_memory_bytes) == 2
    assert "uses 3 devices, but there are 2 processes" in first["refused"]
    assert len(first["after"].step_s) == 5  # the ranks are still together
