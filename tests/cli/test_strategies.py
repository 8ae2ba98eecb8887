"""The whole strategy on the command line: data parallelism where memory allows, a pipeline where it does not, and why."""

import dataclasses
import json

import pytest
from command import run

from rlplace.cli.strategies import best_of_kinds, explain
from rlplace.cluster.parse import parse
from rlplace.graph.capture import capture
from rlplace.placing import Priced, plan_priced
from rlplace.planners.strategy.efficiency import BatchCurve
from rlplace.zoo import load_model

GPT2 = "hf:gpt2,n_layer=4,n_embd=256,n_head=4,vocab_size=1024"


def gpt2(samples):
    model = load_model(GPT2, batch=samples, seq=128, dtype="fp32")
    return capture(model.module, model.example_inputs, source={"model": GPT2})


@pytest.fixture(scope="module")
def graph():
    return gpt2(8)


def strategy_of(graph, memory_bytes):
    """The plan of 32 samples on four NVLink devices with so much memory."""
    cluster = parse("a100-80g:4")
    devices = tuple(dataclasses.replace(d, memory_bytes=memory_bytes, reserved_bytes=0) for d in cluster.devices)
    cluster = dataclasses.replace(cluster, devices=devices)
    _, plan = plan_priced(Priced.model(graph, gpt2, cluster, groups=40), planner="best", global_batch=32)
    return plan


def test_gpt2_is_data_parallel_where_memory_allows_and_a_pipeline_where_it_does_not(graph):
    plan = strategy_of(graph, 8 * 10**9)
    assert plan.predicted.strategies[0]["kind"] == "data parallel" and len(plan.replicas) == 4
    resident = 16 * 3.5e6  # weights, gradients and Adam's two states of 3.5 million parameters
    plan = strategy_of(graph, int(0.95 * resident))
    kinds = {entry["kind"]: entry for entry in plan.predicted.strategies[::-1]}
    assert plan.predicted.strategies[0]["kind"] == "pipeline" and plan.microbatches > 1
    assert kinds["data parallel"]["step_time_s"] is None and "does not fit" in kinds["data parallel"]["reason"]
    assert plan.predicted.feasible


def test_one_batch_through_several_devices_is_not_offered_as_fast(graph):
    entries = strategy_of(graph, 8 * 10**9).predicted.strategies
    rates = {entry["kind"]: entry["samples_per_s"] for entry in best_of_kinds(entries)}
    assert entries[0]["samples_per_s"] == max(rate for rate in rates.values() if rate is not None)
    single = next(e for e in entries if e["kind"] == "single device")
    parallel = [e for e in entries if e["kind"] == "model parallel" and e["step_time_s"] is not None]
    assert all(e["samples_per_s"] < 1.2 * single["samples_per_s"] for e in parallel)  # a chain has next to nothing to share


def test_place_ranks_and_explains(capsys):
    code, out, _ = run(
        capsys, "place", GPT2, "--cluster", "a100-80g:4", "--seq", "64", "--granularity", "30", "--planner", "best",
        "--global-batch", "16",
    )  # fmt: skip
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith(("data parallel", "pipeline", "single", "model"))]
    rates = [float(line.split()[-3]) for line in rows if not line.endswith("-")]
    assert len(rates) >= 2 and rates == sorted(rates, reverse=True)
    assert "chosen: " in out and "times longer for the same samples" in out


def test_a_batch_curve_chooses_the_global_batch(capsys, tmp_path):
    curve = tmp_path / "curve.json"
    BatchCurve(points=((8, 10), (16, 30))).save(curve)
    arguments = ["place", GPT2, "--cluster", "a100-80g:4", "--seq", "64", "--granularity", "30", "--planner", "best"]
    code, out, _ = run(capsys, *arguments, "--batch", "8", "--batch-curve", str(curve), "--json")
    plan = json.loads(out)
    assert code == 0 and "replicas" not in plan  # twice the samples would take three times the epochs
    assert all(entry["epochs"] is None or entry["epochs"] >= 10 for entry in plan["predicted"]["strategies"])
    code, out, _ = run(capsys, *arguments, "--batch", "8", "--batch-curve", str(curve))
    assert code == 0 and "epochs, time to target" in out
    code, _, err = run(capsys, *arguments, "--batch-curve", str(curve), "--global-batch", "8")
    assert code == 2 and "leave --global-batch out" in err


def test_a_plan_for_one_batch_says_what_its_devices_bring(capsys, tmp_path):
    code, out, _ = run(
        capsys, "place", "zoo:inception", "--cluster", "a100-80g:2", "--batch", "16", "--granularity", "60", "--planner", "best"
    )
    assert code == 0 and "2 devices are 1." in out


def test_what_was_not_tried_is_told():
    entry = {
        "kind": "pipeline", "replicas": 1, "width": 2, "microbatches": 2, "samples": 4, "schedule": "list", "epochs": None,
        "step_time_s": 1.0, "samples_per_s": 8.0, "busy": 0.5, "bound_s": 0.5, "cost": 0.1, "reason": None,
    }  # fmt: skip
    late = {**entry, "kind": "data parallel", "step_time_s": None, "cost": None, "reason": "not tried: the time was up"}
    text = "\n".join(explain([entry, late]))
    assert "chosen: pipeline, 2 devices, 2 micro-batches" in text
    assert "not tried for lack of time: 1" in text


@pytest.mark.parametrize(("planner", "told"), [("pase", "ops are cut, into up to"), ("bipartition", "planner bipartition")])
def test_planners_that_need_another_view_of_the_problem_get_it(capsys, tmp_path, planner, told):
    plan_file = tmp_path / "p.plan.json"
    arguments = ["place", GPT2, "--cluster", "a100-80g:2", "--seq", "64", "--granularity", "30", "--planner", planner]
    code, out, _ = run(capsys, *arguments, "--out", str(plan_file))
    assert code == 0 and told in out
    assert json.loads(plan_file.read_text())["predicted"]["feasible"]
