"""`--costs` and `--host-mode` reach the problem, and what times rest on is said."""

import json

import pytest

from rlplace.cli.main import main
from rlplace.cost import CostTable
from rlplace.cost.table import KindCosts
from rlplace.problem import Problem

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
