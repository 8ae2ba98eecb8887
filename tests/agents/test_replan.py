"""Planning again after a drift: located by busy seconds, or guessed; the running plan stays as it is."""

import copy
import dataclasses

import numpy as np
import pytest

from rlplace.agents.drift_causes import causes_of, run_plan, weights_of
from rlplace.agents.replan import main, problem_of, replan
from rlplace.errors import InputError
from rlplace.measured.correction import corrected, no_correction
from rlplace.measured.replan_report import Hypothesis, ReplanReport
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.problem.toys import TensorSpec, build_problem, random_problem, two_branches

SLOW = 2.0


def with_devices(problem, factor):
    return corrected(problem, dataclasses.replace(no_correction(problem), device_factor=np.asarray(factor, dtype=np.float64)))


@pytest.fixture(scope="module")
def drifted():
    """A problem, a plan for it, the problem as it is since device 1 is half as fast."""
    from rlplace.planners import get_planner

    problem = random_problem(0, 24, 4)
    plan = get_planner("best")(problem, seed=0)
    return problem, plan, with_devices(problem, [1, SLOW, 1, 1])


def measured(drifted):
    problem, plan, true = drifted
    before, after = run_plan(problem, plan), run_plan(true, plan)
    return before, after, {"ratio": after.step_time_s / before.step_time_s, "measured_s": 1.3 * after.step_time_s}


def test_with_busy_seconds_the_slow_device_is_found(drifted):
    problem, plan, _ = drifted
    off = with_devices(problem, [1.1] * 4)  # the cost model was wrong by 10 % before anything happened
    true = with_devices(problem, [1.1, 1.1 * SLOW, 1.1, 1.1])
    before, after = run_plan(off, plan), run_plan(true, plan)
    told = {"ratio": after.step_time_s / before.step_time_s, "measured_s": 1.3 * after.step_time_s}
    kept = copy.deepcopy(plan.to_dict())
    report, better = replan(problem, plan, **told, busy_s=after.busy_s, busy_before_s=before.busy_s, time_limit_s=1.0)
    assert report.located
    (only,) = report.hypotheses
    assert "gpu1 2 times slower" in only.name
    gain = 1 - run_plan(true, better).step_time_s / after.step_time_s
    assert gain > 0.05
    assert only.gain == pytest.approx(gain, rel=0.02)
    assert only.running_s == pytest.approx(told["measured_s"])
    assert better.problem == plan.problem  # it runs where the running one does
    assert better.source == plan.source
    assert plan.to_dict() == kept
    assert report.migration_bytes > 0 and report.moved_groups > 0
    assert report.break_even_steps == pytest.approx(
        (report.transfer_s + report.restart_s) / (only.running_s - only.proposed_s), abs=1
    )


def test_without_them_every_cause_is_tried_and_it_says_so(drifted):
    problem, plan, _ = drifted
    told = measured(drifted)[2]
    report, better = replan(problem, plan, **told, time_limit_s=1.5)
    assert not report.located
    names = [h.name for h in report.hypotheses]
    assert any(
        name.startswith(("device gpu1 2 ", "device gpu1 2.0", "device gpu1 1.9")) for name in names
    )  # the true one is among them
    assert sum(name.startswith("device") for name in names) == len(set(plan.device_of_group.tolist()))
    assert any(name.startswith("link") for name in names)
    assert names[-1].startswith("everything")
    assert sum(h.weight for h in report.hypotheses) == pytest.approx(1)
    true_one = next(h for h in report.hypotheses if h.name.startswith("device gpu1"))
    assert true_one.running_s == pytest.approx(told["measured_s"], rel=0.01)
    assert true_one.best_gain > 0.05
    assert true_one.best_s <= true_one.running_s
    text = "\n".join(dataclasses.replace(report, proposal="q" if better else None).lines())
    assert "do not say where" in text and "rlplace measure --links" in text and "rlplace measure --plans" in text
    if better is not None:
        for h, cause in zip(report.hypotheses, causes_of(problem, plan, told["ratio"], told["measured_s"])[0], strict=True):
            world = corrected(problem, cause.correction)
            assert h.proposed_s / h.running_s == pytest.approx(
                run_plan(world, better).step_time_s / run_plan(world, plan).step_time_s
            )
    else:
        assert sum(h.weight * h.gain for h in report.hypotheses) == 0


def test_every_cause_explains_the_step(drifted):
    problem, plan, _ = drifted
    _, after, told = measured(drifted)
    causes, located, _ = causes_of(problem, plan, told["ratio"], told["measured_s"])
    assert not located
    for cause in causes:
        assert run_plan(corrected(problem, cause.correction), plan).step_time_s == pytest.approx(after.step_time_s, rel=0.02)
    weight = weights_of(causes)
    order = np.argsort([cause.amount for cause in causes])
    assert (np.diff(weight[order]) <= 0).all()


def test_faster_steps_are_explained_too(drifted):
    problem, plan, _ = drifted
    before = run_plan(problem, plan)
    causes, _, _ = causes_of(problem, plan, 0.8, 0.8 * before.step_time_s)
    assert causes[-1].name == "everything 1.25 times faster"
    for cause in causes:
        found = run_plan(corrected(problem, cause.correction), plan).step_time_s
        assert found == pytest.approx(0.8 * before.step_time_s, rel=0.02)


def test_busy_seconds_as_before_leave_the_links():
    problem = build_problem(
        "pair",
        time_s=[[1.0, 1.0], [1.0, 1.0]],
        tensors=[TensorSpec(0, 1, [1])],
        memory_bytes=[None, None],
        bandwidth_bytes_per_s=1.0,
    )
    plan = make_plan(problem, [0, 1], planner="hand")  # 1 s, 1 s to send, 1 s
    busy = [1.0, 1.0]
    report, better = replan(
        problem, plan, ratio=2.0, measured_s=6.0, busy_s=busy, busy_before_s=busy, time_limit_s=0.2, restart_s=10.0
    )
    (only,) = report.hypotheses
    assert report.located
    assert only.name.startswith("devices as before, link gpu0 to gpu1 4")
    assert better.device_of_group[0] == better.device_of_group[1]  # 2 s
    assert only.proposed_s == pytest.approx(2.0, rel=0.01)
    assert report.moved_groups == 1
    assert report.break_even_steps == 3  # 10 s at 4 s a step
    # What neither the devices nor a link can explain is said.
    alone = make_plan(problem, [0, 0], planner="hand")
    report, better = replan(
        problem, alone, ratio=2.0, measured_s=4.0, busy_s=[2.0, 0], busy_before_s=[2.0, 0], time_limit_s=0.2
    )
    assert better is None and "no link alone for the rest" in report.note


def test_everything_slower_proposes_nothing_on_one_device():
    problem = two_branches().problem
    plan = make_plan(problem, two_branches().optimal_device_of_group, planner="hand")
    busy = run_plan(problem, plan).busy_s
    step_s = run_plan(problem, plan).step_time_s
    report, better = replan(
        problem, plan, ratio=1.5, measured_s=1.5 * step_s, busy_s=1.5 * busy, busy_before_s=busy, time_limit_s=0.2
    )
    assert better is None and report.proposal is None
    assert "within 2 %" in report.note or report.hypotheses[0].best_gain < 0.02


def test_replicas_are_not_planned_again(drifted):
    problem = drifted[0]
    twice = make_plan(problem, [0] * problem.num_groups, planner="hand", replicas=[[0], [1]])
    report, better = replan(problem, twice, ratio=2.0, measured_s=1.0)
    assert better is None and "replicas" in report.note and report.hypotheses == ()


def test_refusals(drifted):
    problem, plan, true = drifted
    with pytest.raises(InputError, match="plan is for problem"):
        replan(true, plan, ratio=2.0, measured_s=1.0)
    with pytest.raises(InputError, match="ratio"):
        replan(problem, plan, ratio=0.0, measured_s=1.0)
    with pytest.raises(InputError, match="4 numbers"):
        replan(problem, plan, ratio=2.0, measured_s=1.0, busy_s=[1.0])
    with pytest.raises(InputError, match="no device"):
        replan(problem, plan, ratio=2.0, measured_s=1.0, busy_s=[0.0] * 4)


def test_files_and_the_background_command(drifted, tmp_path, capsys):
    problem, plan, _ = drifted
    before, after, told = measured(drifted)
    problem.save(tmp_path / "x.problem.json")
    plan.save(tmp_path / "p.plan.json")
    command = ["--plan", f"{tmp_path}/p.plan.json", "--problem", f"{tmp_path}/x.problem.json", "--ratio", str(told["ratio"])]
    command += ["--measured-s", str(told["measured_s"]), "--time-limit-s", "0.5", "--report", f"{tmp_path}/r.replan.json"]
    command += ["--busy-s", ",".join(map(str, after.busy_s)), "--busy-before-s", ",".join(map(str, before.busy_s))]
    assert main([*command, "--out", f"{tmp_path}/q.plan.json"]) == 0
    report = ReplanReport.load(tmp_path / "r.replan.json")
    assert report.proposal == f"{tmp_path}/q.plan.json" and report.plan == plan.fingerprint
    assert PlacementPlan.load(report.proposal, problem).planner == "agent"
    assert f"proposed plan: {tmp_path}/q.plan.json" in "\n".join(report.lines())
    assert main([*command, "--out", f"{tmp_path}/nowhere/q.plan.json"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nowhere" in error
    with pytest.raises(InputError, match="cluster"):
        problem_of(plan, None)  # it does not say what it was made from


def test_reports_are_read_strictly(tmp_path):
    path = tmp_path / "r.replan.json"
    report = ReplanReport("plan", 2.0, 1.0, False, (Hypothesis("a", 1.0, 2.0, 1.5, 1.0),), "q", 1, 10, None, 60.0, None, "note")
    report.save(path)
    assert ReplanReport.load(path) == report
    assert "restart from a checkpoint" in "\n".join(report.lines())
    good = report.to_dict()
    bad = [("ratio", "2"), ("located", 1), ("hypotheses", [1]), ("proposal", 3), ("moved_groups", -1), ("note", None)]
    for key, value in bad:
        ReplanReport.load(path)
        from rlplace.files import write_json

        write_json(tmp_path / "bad.json", {**good, key: value})
        with pytest.raises(InputError, match=key.removesuffix("es").removesuffix("i")):
            ReplanReport.load(tmp_path / "bad.json")
