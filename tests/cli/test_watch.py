"""``--watch``: reads a steps file once or follows it, tells of drifts and plans again."""

import argparse
import dataclasses
import json

import numpy as np
import pytest

from rlplace.cli import watch as cli
from rlplace.errors import InputError
from rlplace.measured.correction import corrected, no_correction
from rlplace.measured.steps_file import StepHeader, StepsWriter
from rlplace.plan.plan import PlacementPlan
from rlplace.planners import get_planner
from rlplace.problem.toys import random_problem
from rlplace.simulator import simulate


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory):
    """Files of a problem and its plan; step and busy seconds before and since device 1 is half as fast."""
    folder = tmp_path_factory.mktemp("watched")
    problem = random_problem(0, 16, 3)
    plan = get_planner("best")(problem)
    problem.save(folder / "x.problem.json")
    plan.save(folder / "p.plan.json")
    true = corrected(problem, dataclasses.replace(no_correction(problem), device_factor=np.array([1.0, 2.0, 1.0])))
    return folder, plan, simulate(problem, plan), simulate(true, plan.device_of_group)


def write(path, plan, parts, header=None):
    """A steps file with `parts` of (count, seconds, busy seconds or None)."""
    writer = StepsWriter(path, header or StepHeader(plan.fingerprint, plan.problem, plan.predicted["step_time_s"]))
    rng = np.random.default_rng(0)
    lines = []
    for count, seconds, busy in parts:
        for _ in range(count):
            line = {"step": len(lines), "s": seconds * float(np.exp(0.02 * rng.standard_normal())), "at": 0.0}
            lines.append(json.dumps(line | ({} if busy is None else {"busy_s": list(busy)})))
    writer.write(lines)


def options(folder, path, *more):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")  # as a verb that has some options already
    cli.add_watch_arguments(parser)
    given = ["--watch", str(path), "--plan", f"{folder}/p.plan.json", "--problem", f"{folder}/x.problem.json"]
    return parser.parse_args([*given, "--time-limit", "0.4", *more])


def test_once(made, tmp_path, capsys):
    folder, plan, before, after = made
    path = tmp_path / "run.steps.jsonl"
    write(path, plan, [(60, before.step_time_s, before.busy_s)])
    assert cli.run_watch(options(folder, path)) == 0
    assert "60 steps, now" in (text := capsys.readouterr().out) and "nothing to plan" in text
    path.unlink()
    write(path, plan, [(60, before.step_time_s, before.busy_s), (40, after.step_time_s, after.busy_s)])
    assert cli.run_watch(options(folder, path)) == 0
    text = capsys.readouterr().out
    assert "steps are slower since about step 60" in text
    assert "device gpu1 2 times slower" in text and "the running job is left as it is" in text
    (proposed,) = tmp_path.glob("run.step*.plan.json")
    assert str(proposed) in text
    assert PlacementPlan.load(proposed).problem == plan.problem
    out = tmp_path / "q.plan.json"
    assert cli.run_watch(options(folder, path, "--json", "--out", str(out), "--restart-s", "5")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 100 and len(told["drifts"]) == 1 and told["drifts"][0]["direction"] == "slower"
    assert told["report"]["proposal"] == str(out) and told["report"]["restart_s"] == 5.0
    assert told["report"]["located"] and out.exists() and (tmp_path / "q.replan.json").exists()


def test_only_the_latest_run_of_a_file_counts(made, tmp_path, capsys):
    folder, plan, before, after = made
    path = tmp_path / "run.steps.jsonl"
    write(path, plan, [(60, before.step_time_s, None), (40, after.step_time_s, None)])
    write(path, plan, [(50, before.step_time_s, None)])
    assert cli.run_watch(options(folder, path, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["steps"], told["drifts"], told["report"]) == (50, [], None)


def test_a_continued_file_keeps_the_reference(made, tmp_path, capsys):
    folder, plan, before, after = made
    path = tmp_path / "run.steps.jsonl"
    header = StepHeader(plan.fingerprint, plan.problem, None, True, before.step_time_s)
    write(path, plan, [(60, after.step_time_s, None)], header)
    assert cli.run_watch(options(folder, path, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["reference_s"] == before.step_time_s
    assert told["report"]["ratio"] == pytest.approx(after.step_time_s / before.step_time_s, rel=0.03)


def test_follow(made, tmp_path, capsys, monkeypatch):
    folder, plan, before, after = made
    path = tmp_path / "run.steps.jsonl"
    write(path, plan, [(60, before.step_time_s, before.busy_s)])
    naps = []

    def sleep(seconds):
        naps.append(capsys.readouterr().out)
        if len(naps) == 1:
            with open(path, "a") as stream:
                for step in range(60, 100):
                    line = {"step": step, "s": after.step_time_s, "at": 0.0, "busy_s": after.busy_s.tolist()}
                    stream.write(json.dumps(line) + "\n")
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", sleep)
    assert cli.run_watch(options(folder, path, "--follow")) == 0
    assert naps[0] == "" and naps[2] == ""
    assert "steps are slower" in naps[1] and "device gpu1 2 times slower" in naps[1]


def test_refusals(made, tmp_path):
    folder, plan, before, _ = made
    path = tmp_path / "run.steps.jsonl"
    with pytest.raises(InputError, match="cannot be read"):
        cli.run_watch(options(folder, path))
    path.write_text("")
    with pytest.raises(InputError, match="nothing in it yet"):
        cli.run_watch(options(folder, path))
    write(path, plan, [(20, before.step_time_s, None)], StepHeader("other", plan.problem))
    with pytest.raises(InputError, match="give the plan that the run uses"):
        cli.run_watch(options(folder, path))
    path.unlink()
    write(path, plan, [(20, before.step_time_s, None)], StepHeader(plan.fingerprint, plan.problem))
    with pytest.raises(InputError, match="predicts no step time"):
        cli.run_watch(options(folder, path, "--reference", "predicted"))
    given = options(folder, path)
    given.plan = None
    with pytest.raises(InputError, match="--plan"):
        cli.run_watch(given)
