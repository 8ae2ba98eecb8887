"""The verbs ``report``, ``explain`` and ``diff``: files, tables, JSON, exit codes, measurements."""

import json

import pytest

from rlplace.cost.timings import PlanTiming, PlanTimings
from rlplace.plan import PlacementPlan
from rlplace.problem.generate import random_problem
from tests.cli.command import run


@pytest.fixture
def report(capsys, folder, tmp_path):
    """Calls `report` for a plan: exit code, output, errors and the page."""
    page = tmp_path / "r.html"
    words = ("report", folder / "one.plan.json", "--problem", folder / "x.problem.json", "--out", page, "--planners")
    return lambda *options: (*run(capsys, *words, *options), page.read_text())


def test_page_and_json(report, tmp_path):
    code, out, err, page = report("single,heft", "--json")
    data = json.loads(out)
    assert code == 0 and data["written"] == [str(tmp_path / "r.html")] and data["feasible"] and data["violations"] == []
    assert err.splitlines() == ["planning with single", "planning with heft"] and ">heft<" in page


def test_without_planners(report, tmp_path):
    code, out, _, page = report("none")
    assert code == 0 and 'id="planners"' not in page
    assert out.splitlines()[0] == f"wrote {tmp_path / 'r.html'}" and out.splitlines()[1].endswith("feasible")


def test_measurements(report, folder, tmp_path):
    plan = PlacementPlan.load(folder / "one.plan.json")
    timing = PlanTiming("timed", plan.fingerprint, plan.problem, "hand", "joint", (0.5, 0.6), (), 1.0, 0.4)
    PlanTimings("job", {}, (timing,)).save(tmp_path / "x.timings.json")
    code, _, _, page = report("none", "--measurements", tmp_path / "x.timings.json")
    assert code == 0 and "timed" in page and page.count('<tr class="this">') == 1


@pytest.fixture
def files(folder):
    return [folder / name for name in ("x.problem.json", "one.plan.json", "two.plan.json")]


def test_explain_a_plan(capsys, files):
    problem, plan, _ = files
    code, out, _ = run(capsys, "explain", plan, "--problem", problem, "--calls", "4")
    assert code == 0
    for word in ("critical path", "busiest device", "no plan takes less than", "what if", "all links twice as fast"):
        assert word in out
    code, out, _ = run(capsys, "explain", plan, "--problem", problem, "--no-what-if", "--group", "group3", "--json")
    data = json.loads(out)
    assert code == 0 and data["feasible"] and data["what_if"] == []
    assert [group["name"] for group in data["groups"]] == ["group3"]
    assert data["bounds"]["step_time_s"] == pytest.approx(sum(part["seconds"] for part in data["bounds"]["path"]))


def test_diff_two_plans(capsys, files):
    problem, first, second = files
    code, out, _ = run(capsys, "diff", first, second, "--problem", problem)
    assert code == 0 and "6 groups sit alike, 2 differ" in out
    code, out, _ = run(capsys, "diff", first, second, "--problem", problem, "--json")
    data = json.loads(out)
    assert code == 0 and data["change_s"] == data["second"]["step_time_s"] - data["first"]["step_time_s"]


def test_a_problem_file_that_fits_is_planned_and_explained(capsys, files):
    code, out, err = run(capsys, "explain", files[0], "--no-what-if", "--groups", "1")
    assert code == 0 and "planner best" in out and "planning with best" in err


def test_place_names_the_command(capsys, tmp_path):
    path = str(tmp_path / "tight.problem.json")
    random_problem(0, 8, 2, memory_factor=0.5).save(path)
    code, _, err = run(capsys, "place", path, "--planner", "best")
    assert code == 3 and f"'rlplace explain {path}' says what would make it fit" in err
    code, out, _ = run(capsys, "explain", path, "--calls", "8")
    assert code == 0 and "makes it fit" in out and "rlplace place MODEL" in out
