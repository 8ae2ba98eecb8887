"""Strategies on the command line, and options of `place` and `capture` for memory and costs."""

import dataclasses
import json

import pytest
from command import run

from rlplace.cli.main import main
from rlplace.cli.strategies import best_of_kinds, explain
from rlplace.cluster.parse import parse
from rlplace.cost import CostTable
from rlplace.cost.footprint import PARTS
from rlplace.cost.table import KindCosts
from rlplace.graph.capture import capture
from rlplace.placing import Priced, plan_priced
from rlplace.plan import PlacementPlan
from rlplace.planners.strategy.efficiency import BatchCurve
from rlplace.problem import Problem
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


TINY = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=64"
PLACE = ("place", TINY, "--cluster", "a100-80g:2", "--planner", "balanced", "--batch", "4", "--seq", "32")


def memory(capsys, *arguments):
    code, out, err = run(capsys, *PLACE, "--memory", "--json", *arguments)
    assert code == 0, err
    return json.loads(out)["predicted"]["memory"]


def test_the_table_has_a_row_per_device(capsys):
    code, out, _ = run(capsys, *PLACE, "--memory")
    assert code == 0
    header = next(line for line in out.splitlines() if line.startswith("GB"))
    assert header.split()[-3:] == ["total", "memory", "fits"] and "weights" in header and "buckets" not in header
    rows = [line.split() for line in out.splitlines() if line.startswith("gpu") and line.endswith("yes")]
    assert [row[0] for row in rows] == ["gpu0", "gpu1"]


def test_parts_add_up_and_the_plan_file_still_loads(capsys, tmp_path):
    path = tmp_path / "p.plan.json"
    found = memory(capsys, "--out", str(path))
    for item in found:
        assert list(item["parts"]) == list(PARTS)
        assert sum(item["parts"].values()) == item["total_bytes"]
        assert item["fits"] and item["capacity_bytes"] == 80_000_000_000
    assert PlacementPlan.load(path).predicted.memory == tuple(found)


def test_options_of_the_script_change_the_answer(capsys):
    plain = memory(capsys)
    wide = memory(capsys, "--alloc-conf", "large_segment_size_mb:40")
    assert plain[0]["parts"]["weights"] == wide[0]["parts"]["weights"] > 0
    assert wide[0]["reserved_peak_bytes"] - plain[0]["reserved_peak_bytes"] == 20 << 20


@pytest.mark.parametrize("options", [("--autocast", "bf16"), ("--dtype", "bf16", "--master-weights")])
def test_mixed_precision_options_reach_the_capture(capsys, options):
    code, out, err = run(capsys, *PLACE, "--json", *options)
    assert code == 0, err
    source = json.loads(out)["source"]
    wanted = {"autocast": "bfloat16"} if "--autocast" in options else {"master_weights": True}
    assert source["capture"] | wanted == source["capture"]


SMALL = ["zoo:mlp,width=32", "--cluster", "a100-80g:2", "--batch", "4"]


@pytest.fixture(scope="module")
def times(tmp_path_factory):
    """Problems of the same model by option."""
    folder = tmp_path_factory.mktemp("costs")
    CostTable({"a100-80g": KindCosts(eager_issue_s=1e-3)}).save(folder / "slow.cost.json")
    found = {}
    for name, extra in (
        ("eager", []),
        ("compiled", ["--host-mode", "compiled"]),
        ("slow", ["--costs", str(folder / "slow.cost.json")]),
    ):
        out = folder / f"{name}.problem.json"
        assert main(["capture", *SMALL, *extra, "--out", str(out), "--json"]) == 0
        found[name] = Problem.load(out)
    return found


def test_the_options_change_the_times(times):
    total = {name: float(problem.time_s.sum()) for name, problem in times.items()}
    assert total["compiled"] < total["eager"] < total["slow"]
    assert times["compiled"].source["host"] == "compiled"
    assert times["slow"].source["costs"]["path"].endswith("slow.cost.json")
    assert times["slow"].source["costs"]["fingerprint"] != times["eager"].source["costs"]["fingerprint"]


def test_what_the_times_rest_on_is_said(tmp_path, capsys):
    assert main(["capture", *SMALL, "--out", str(tmp_path / "x.problem.json"), "--json"]) == 0
    printed = capsys.readouterr()
    shares = json.loads(printed.out)["op_times"]["a100-80g"]
    assert set(shares) <= {"fitted", "scaled"} and sum(shares.values()) == pytest.approx(1.0)
    assert "op times (eager): a100-80g" in printed.err


def test_costs_of_other_devices_are_refused(tmp_path, capsys):
    CostTable({"l4": KindCosts(), "cpu": KindCosts()}).save(tmp_path / "other.cost.json")
    assert main(["place", *SMALL, "--planner", "single", "--costs", str(tmp_path / "other.cost.json")]) == 2
    said = capsys.readouterr().err
    assert "holds costs of cpu, l4, the cluster has a100-80g" in said and "capturing" not in said


@pytest.mark.parametrize("extra", [["--costs", "none.cost.json"], ["--costs", __file__]])
def test_a_cost_file_that_cannot_be_used(extra, tmp_path, capsys):
    assert main(["capture", *SMALL, *extra, "--out", str(tmp_path / "x.problem.json")]) == 2
    assert extra[1].rpartition("/")[2] in capsys.readouterr().err
    assert not (tmp_path / "x.problem.json").exists()
