"""The verb ``report``: files written, one-line errors, measurements of both kinds."""

import dataclasses
import json

import command
import numpy as np
import pytest

from rlplace.cost.timings import PlanTiming, PlanTimings
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import Trial
from rlplace.plan.plan import make_plan
from rlplace.problem.generate import random_problem


@pytest.fixture
def made(tmp_path):
    problem = random_problem(3, num_groups=12, num_devices=2, memory_factor=2.0)
    problem.save(tmp_path / "x.problem.json")
    plan = make_plan(problem, [0] * 6 + [1] * 6, planner="hand")
    plan.save(tmp_path / "x.plan.json")
    return problem, plan, tmp_path


def run(capsys, *arguments):
    return command.run(capsys, "report", *arguments)


def page(capsys, folder, *options):
    return run(capsys, folder / "x.plan.json", "--problem", folder / "x.problem.json", "--out", folder / "r.html", *options)


def test_page_trace_and_json(capsys, made):
    _, _, folder = made
    plan, problem, page, trace = (folder / name for name in ("x.plan.json", "x.problem.json", "r.html", "t.json"))
    code, out, err = run(
        capsys, plan, "--problem", problem, "--out", page, "--trace", trace, "--planners", "single,heft", "--json"
    )
    assert code == 0
    data = json.loads(out)
    assert data["written"] == [str(page), str(trace)] and data["feasible"] and data["violations"] == []
    assert err.splitlines() == ["planning with single", "planning with heft"]
    assert ">heft<" in page.read_text() and json.loads(trace.read_text())["otherData"]["step_time_s"] == data["step_time_s"]


def test_without_planners(capsys, made):
    _, _, folder = made
    code, out, _ = page(capsys, folder, "--planners", "none")
    assert code == 0 and 'id="planners"' not in (folder / "r.html").read_text()
    assert out.splitlines()[0] == f"wrote {folder / 'r.html'}" and out.splitlines()[1].endswith("feasible")


def test_measurements_of_both_kinds(capsys, made):
    problem, plan, folder = made
    timing = PlanTiming("timed", plan.fingerprint, problem.fingerprint, "hand", "joint", "computed", (0.5, 0.6), (), 1.0, 0.4)
    PlanTimings("job", {}, (timing,)).save(folder / "x.timings.json")
    with TrialStore(folder / "trials.db") as store:
        store.add_problem(problem)
        trial = Trial(
            problem.fingerprint, "", tuple(plan.device_of_group.tolist()), 1, "list", "done", (0.7, 0.8), predicted_s=0.4
        )
        store.add(trial)
        failed = dataclasses.replace(
            trial, status="out_of_memory", step_s=(), reason="gpu0 was full", device_of_group=(0,) * 12
        )
        store.add(failed)
    measured = ("--measurements", folder / "x.timings.json", "--measurements", folder / "trials.db")
    code, _, _ = page(capsys, folder, "--planners", "none", *measured)
    text = (folder / "r.html").read_text()
    assert code == 0
    assert "timed" in text and "trial 1" in text and "out of memory. gpu0 was full" in text
    assert text.count('<tr class="this">') == 2


def test_infeasible_plans_are_reported(capsys, made):
    problem, _, folder = made
    small = tuple(dataclasses.replace(device, memory_bytes=1000) for device in problem.devices)
    tight = dataclasses.replace(problem, devices=small)
    tight.save(folder / "x.problem.json")
    make_plan(tight, np.zeros(12), planner="hand").save(folder / "x.plan.json")
    code, out, _ = page(capsys, folder, "--planners", "single")
    assert code == 0 and "infeasible: gpu0 needs" in out and "no plan: " in (folder / "r.html").read_text()


def test_pictures_without_matplotlib(capsys, made, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _, _, folder = made
    code, _, err = page(capsys, folder, "--pictures", folder / "p")
    assert code == 4 and "pip install 'rlplace[plots]'" in err
    assert not (folder / "r.html").exists() and not (folder / "p").exists()
