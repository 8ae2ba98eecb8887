"""Options of `place` and `capture` for memory and costs."""

import json

import numpy as np
import pytest

import rlplace
from rlplace.cli.main import main
from rlplace.cost import CostTable
from rlplace.cost.footprint import PARTS
from rlplace.cost.table import KindCosts
from rlplace.model.zoo import load_model
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem
from tests.cli.command import run


@pytest.mark.slow
def test_a_plan_for_one_batch_says_what_its_devices_bring(capsys, tmp_path):
    code, out, _ = run(
        capsys, "place", "zoo:inception", "--cluster", "a100-80g:2", "--batch", "16", "--granularity", "60", "--planner", "best"
    )
    assert code == 0 and "2 devices are 1." in out


TINY = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=64"
PLACE = ("place", TINY, "--cluster", "a100-80g:2", "--planner", "balanced", "--batch", "4", "--seq", "32")


def memory(capsys, *arguments):
    code, out, err = run(capsys, *PLACE, "--memory", "--json", *arguments)
    assert code == 0, err
    return json.loads(out)["predicted"]["memory"]


@pytest.mark.slow
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
        ("slow host", ["--host-us-per-op", "1000"]),
        ("slow layers", ["--host-us-per-layer", "30000"]),
    ):
        out = folder / f"{name}.problem.json"
        assert main(["capture", *SMALL, *extra, "--out", str(out), "--json"]) == 0
        found[name] = Problem.load(out)
    return found


def test_the_options_change_the_times(times):
    total = {name: float(problem.time_s.sum()) for name, problem in times.items()}
    assert total["compiled"] < total["eager"] < total["slow"]
    assert total["slow host"] == pytest.approx(total["slow"])
    assert total["slow layers"] == pytest.approx(2 * 15 * 0.03, rel=0.05)  # devices, elements of its list
    assert times["slow layers"].source["costs"]["fingerprint"] != times["eager"].source["costs"]["fingerprint"]
    assert times["compiled"].source["host"] == "compiled"
    assert times["slow"].source["costs"]["path"].endswith("slow.cost.json")
    assert times["slow"].source["costs"]["fingerprint"] != times["eager"].source["costs"]["fingerprint"]


def test_what_the_times_rest_on_is_said(tmp_path, capsys):
    assert main(["capture", *SMALL, "--out", str(tmp_path / "x.problem.json"), "--json"]) == 0
    printed = capsys.readouterr()
    shares = json.loads(printed.out)["op_times"]["a100-80g"]
    assert set(shares) <= {"fitted", "extrapolated", "scaled"} and sum(shares.values()) == pytest.approx(1.0)
    assert "op times (eager): a100-80g" in printed.err


def test_costs_of_other_devices_are_refused(tmp_path, capsys):
    CostTable({"l4": KindCosts(), "cpu": KindCosts()}).save(tmp_path / "other.cost.json")
    assert main(["place", *SMALL, "--planner", "single", "--costs", str(tmp_path / "other.cost.json")]) == 2
    said = capsys.readouterr().err
    assert "holds costs of cpu, l4, the cluster has a100-80g" in said and "capturing" not in said


@pytest.mark.slow
@pytest.mark.long
def test_branches_side_by_side_beat_every_strategy(capsys, tmp_path):
    """Random cells: a placement of one micro-batch is quicker, so it is the answer, in Python too."""
    words = ["place", "zoo:nasnet", "--cluster", "a100-80g:4", "--batch", "8", "--calls", "30", "--granularity", "200"]
    code, out, _ = run(capsys, *words, "--out", tmp_path / "x.plan.json")
    placed = PlacementPlan.load(tmp_path / "x.plan.json")
    assert code == 0 and placed.strategy is None and "branches side by side take" in out
    takes_ms = float(out.split("the best strategy ")[1].split(" ms")[0])
    assert (placed.predicted.op_level or placed.predicted).step_s * 1e3 < takes_ms
    model = load_model("zoo:nasnet", batch=8)
    asked = {"example_inputs": model.example_inputs, "loss": model.loss, "batch": 8, "calls": 30, "time_limit_s": None}
    same = rlplace.place(model.module, "a100-80g:4", **asked)
    assert same.strategy is None and np.array_equal(same.device_of_group, placed.device_of_group)
    assert same.predicted.to_dict() == placed.predicted.to_dict()
