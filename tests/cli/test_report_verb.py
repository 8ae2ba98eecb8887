"""The verbs ``report``, ``explain`` and ``diff``: files, tables, JSON, exit codes, measurements."""

import json

import pytest

from rlplace.cost.timings import PlanTiming, PlanTimings
from rlplace.plan import make_plan
from rlplace.problem.generate import random_problem
from tests.cli.command import run


@pytest.fixture
def made(tmp_path):
    problem = random_problem(3, num_groups=12, num_devices=2, memory_factor=2.0)
    problem.save(tmp_path / "x.problem.json")
    plan = make_plan(problem, [0] * 6 + [1] * 6, planner="hand")
    plan.save(tmp_path / "x.plan.json")
    return problem, plan, tmp_path


def report(capsys, *arguments):
    return run(capsys, "report", *arguments)


def page(capsys, folder, *options):
    return report(capsys, folder / "x.plan.json", "--problem", folder / "x.problem.json", "--out", folder / "r.html", *options)


def test_page_and_json(capsys, made):
    _, _, folder = made
    plan, problem, page = (folder / name for name in ("x.plan.json", "x.problem.json", "r.html"))
    code, out, err = report(capsys, plan, "--problem", problem, "--out", page, "--planners", "single,heft", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["written"] == [str(page)] and data["feasible"] and data["violations"] == []
    assert err.splitlines() == ["planning with single", "planning with heft"]
    assert ">heft<" in page.read_text()


def test_without_planners(capsys, made):
    _, _, folder = made
    code, out, _ = page(capsys, folder, "--planners", "none")
    assert code == 0 and 'id="planners"' not in (folder / "r.html").read_text()
    assert out.splitlines()[0] == f"wrote {folder / 'r.html'}" and out.splitlines()[1].endswith("feasible")


def test_measurements(capsys, made):
    problem, plan, folder = made
    timing = PlanTiming("timed", plan.fingerprint, problem.fingerprint, "hand", "joint", (0.5, 0.6), (), 1.0, 0.4)
    PlanTimings("job", {}, (timing,)).save(folder / "x.timings.json")
    code, _, _ = page(capsys, folder, "--planners", "none", "--measurements", folder / "x.timings.json")
    text = (folder / "r.html").read_text()
    assert code == 0 and "timed" in text and text.count('<tr class="this">') == 1


@pytest.fixture
def files(tmp_path):
    problem = random_problem(0, num_groups=8, num_devices=2)
    paths = [str(tmp_path / name) for name in ("x.problem.json", "a.plan.json", "b.plan.json")]
    problem.save(paths[0])
    make_plan(problem, [0, 0, 0, 0, 1, 1, 1, 1], planner="one").save(paths[1])
    make_plan(problem, [0, 0, 1, 1, 1, 1, 1, 1], planner="two").save(paths[2])
    return paths


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
