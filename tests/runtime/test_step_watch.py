"""`StepWatch`: what it writes, tells and starts; and that nothing that goes wrong there reaches the training loop."""

import copy
import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest

import rlplace
from rlplace.errors import InputError
from rlplace.measured.correction import corrected, no_correction
from rlplace.measured.steps_file import StepHeader, StepLine, StepsReader
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.toys import random_problem
from rlplace.runtime import step_watch
from rlplace.runtime.step_watch import StepWatch
from rlplace.simulator import simulate


@pytest.fixture(name="problem", scope="module")
def _problem():
    return random_problem(0, 16, 3)


@pytest.fixture(name="plan", scope="module")
def _plan(problem):
    from rlplace.planners import get_planner

    return get_planner("best")(problem)


@pytest.fixture(name="told")
def _told():
    return []


def steps(seconds, count, seed=0):
    return (seconds * np.exp(0.02 * np.random.default_rng(seed).standard_normal(count))).tolist()


def items(path):
    return [item for item in StepsReader(path).read() if isinstance(item, StepLine)]


def until(watch, condition, seconds, more_s=60.0):
    """Feeds steps until the condition holds."""
    deadline = time.monotonic() + more_s
    while not condition():
        assert time.monotonic() < deadline
        watch.step_done(seconds)
        time.sleep(0.01)


@pytest.fixture(name="stand_in")
def _stand_in(tmp_path, monkeypatch):
    """Replaces the background process by a shell script."""

    def replace(script):
        path = tmp_path / "stand_in"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def drifting(plan, problem, out, told, **how):
    """A watch whose steps have just become twice as long."""
    watch = StepWatch(plan, problem, out, report=told.append, **how)
    for seconds in [*steps(0.1, 60), *steps(0.2, 12)]:
        watch.step_done(seconds)
    assert len(watch.drifts) == 1
    return watch


def test_a_slow_device_is_planned_around_in_the_background(problem, plan, tmp_path, told):
    factor = np.array([1.0, 2.0, 1.0])
    true = corrected(problem, dataclasses.replace(no_correction(problem), device_factor=factor))
    before, after = simulate(problem, plan), simulate(true, plan.device_of_group)
    kept = copy.deepcopy(plan.to_dict())
    out = tmp_path / "run.steps.jsonl"
    watch = rlplace.StepWatch(plan, problem, out, report=told.append, time_limit_s=0.5, restart_s=30.0)
    for seconds in steps(before.step_time_s, 60):
        watch.step_done(seconds, before.busy_s)
    assert told == [] and watch.drifts == []
    for seconds in steps(after.step_time_s, 30):
        watch.step_done(seconds, after.busy_s)
    pid = watch._job.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) >= os.getpriority(os.PRIO_PROCESS, 0)
    until(watch, lambda: watch.reports, after.step_time_s)
    (report,) = watch.reports
    assert report.located and "device gpu1 2 times slower" in report.hypotheses[0].name
    better = PlacementPlan.load(report.proposal, problem)
    gain = 1 - simulate(true, better.device_of_group, priority=better.priority).step_time_s / after.step_time_s
    assert gain > 0.05
    assert report.mean_gain == pytest.approx(gain, rel=0.05)
    assert report.restart_s == 30.0 and report.migration_bytes > 0
    assert plan.to_dict() == kept
    assert watch._plan is plan
    watch.close()
    text = "\n".join(told)
    assert f"in process {pid}" in text and "proposed plan" in text and "the running job is left as it is" in text
    assert all("\n" not in line for line in told)
    events = [json.loads(line) for line in out.read_text().splitlines() if '"event"' in line]
    assert [event["event"] for event in events] == ["drift", "replanned"]
    names = sorted(path.name for path in tmp_path.iterdir())
    step = watch.drifts[0].step
    assert names == [f"run.step{step}.plan.json", f"run.step{step}.replan.json", "run.steps.jsonl"]
    assert not os.path.exists(f"/proc/{pid}")


def test_every_step_is_in_the_file_and_written_in_batches(problem, plan, tmp_path, told, monkeypatch):
    out = tmp_path / "run.steps.jsonl"
    watch = StepWatch(plan, problem, out, report=told.append)
    writes = []
    write = watch._writer.write
    monkeypatch.setattr(watch._writer, "write", lambda *how: (writes.append(len(how[0])), write(*how)))
    monkeypatch.setattr(step_watch, "_FLUSH_S", math.inf)
    for seconds in steps(0.1, 1000):
        with watch.step():
            pass
        watch.step_done(seconds)
    watch.close()
    assert len(writes) == math.ceil(2000 / 64)
    found = list(StepsReader(out).read())
    assert found[0] == StepHeader(plan.fingerprint, problem.fingerprint, plan.predicted["step_time_s"])
    assert [item.step for item in found[1:]] == list(range(2000))
    assert [item.seconds for item in found[2::2]] == pytest.approx(steps(0.1, 1000), rel=1e-8)
    watch.step_done(1.0)  # after the end: nothing
    watch.close()
    assert len(items(out)) == 2000


def test_the_clock(problem, plan, tmp_path, told, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(step_watch.time, "perf_counter", lambda: now[0])
    waited = []
    watch = StepWatch(plan, problem, tmp_path / "a.jsonl", report=told.append, synchronize=lambda: waited.append(now[0]))
    with watch.step():
        now[0] += 2.0
    with pytest.raises(ValueError, match="own"), watch.step():
        raise ValueError("own")
    now[0] += 50.0
    with watch.step():
        now[0] += 3.0
    watch.step_done()
    now[0] += 4.0
    watch.step_done()
    watch.close()
    assert [item.seconds for item in items(tmp_path / "a.jsonl")] == [2.0, 3.0, 4.0]
    assert len(waited) == 5  # before and after, and once for the step that raised


def test_a_drift_back_is_told_and_not_planned_for(problem, plan, tmp_path, told, stand_in):
    stand_in("exec sleep 100")
    watch = StepWatch(plan, problem, tmp_path / "a.jsonl", report=told.append, pause_s=1000.0)
    for seconds in [*steps(0.1, 60), *steps(0.2, 60), *steps(0.1, 60), *steps(0.05, 60)]:
        watch.step_done(seconds)
    assert [drift.direction for drift in watch.drifts] == ["slower", "faster", "faster"]
    assert sum("as long as the reference again" in line for line in told) == 1
    assert sum("planning again in process" in line for line in told) == 1
    assert watch._pending is watch.drifts[2]  # one at a time, and not more often than was said
    pid = watch._job.process.pid
    watch.close()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo first >&2; echo 'x.problem.json: broken' >&2; exit 2", "exit code 2: x.problem.json: broken"),
        ("exit 1", "exit code 1: no message"),
        ("exit 0", "cannot be read"),
        ("kill -9 $$", "ended by signal 9"),
    ],
)
def test_a_background_process_that_fails_is_one_line(problem, plan, tmp_path, told, stand_in, script, reason):
    stand_in(script)
    watch = drifting(plan, problem, tmp_path / "run.steps.jsonl", told)
    until(watch, lambda: watch._job is None, 0.2)
    assert sum("planning again failed" in line for line in told) == 1
    assert reason in told[-1] and "training goes on" in told[-1] and "\n" not in told[-1]
    count = watch._detector.count
    watch.step_done(0.2)
    assert watch._detector.count == count + 1 and watch.reports == []
    watch.close()


def test_one_that_hangs_is_ended_by_its_id(problem, plan, tmp_path, told, stand_in):
    stand_in("exec sleep 100")
    watch = drifting(plan, problem, tmp_path / "run.steps.jsonl", told)
    job = watch._job
    job.most_s = 0.0
    watch.step_done(0.2)
    assert job.process.returncode == -15
    assert "did not end within" in told[-1]
    watch.close()


def test_what_cannot_be_started_is_one_line(problem, plan, tmp_path, told, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    watch = drifting(plan, problem, tmp_path / "run.steps.jsonl", told)
    assert sum("could not be started" in line for line in told) == 1
    assert watch.active and watch._job is None
    watch.close()


def test_a_place_that_cannot_be_written_is_one_line_at_the_start(problem, plan, tmp_path, told, stand_in):
    stand_in("exit 1")
    watch = drifting(plan, problem, tmp_path / "no" / "run.steps.jsonl", told)
    assert "cannot be written" in told[0]
    assert sum("slower" in line for line in told) == 1  # the drift is told, nothing is started
    assert not any("planning again" in line for line in told) and watch._job is None
    watch.close()
    told.clear()
    watch = StepWatch(plan, problem, tmp_path / "full.jsonl", report=told.append)

    def full(*_):
        raise OSError(28, "No space left on device")

    watch._writer.write = full
    for seconds in steps(0.1, 300):
        watch.step_done(seconds)
    assert sum("No space left" in line for line in told) == 1
    watch.close()


def test_an_error_of_its_own_ends_the_watch_not_the_training(problem, plan, tmp_path, capsys):
    def report(line):
        raise RuntimeError("no\nway")

    watch = StepWatch(plan, problem, tmp_path / "a.jsonl", report=report, replan=False)
    for seconds in [*steps(0.1, 60), *steps(0.2, 60)]:
        watch.step_done(seconds)
    assert not watch.active
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "RuntimeError: no way" in error


def test_other_ranks_do_nothing(problem, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    out = tmp_path / "a.jsonl"
    watch = StepWatch("no such plan", problem, out)
    monkeypatch.setattr(step_watch.time, "perf_counter", lambda: pytest.fail("the clock was read"))
    for _ in range(100):
        with watch.step():
            pass
        watch.step_done(1.0)
    watch.close()
    assert not watch.active and not out.exists()


def test_a_copy_in_another_process_is_passive(problem, plan, tmp_path, told):
    watch = StepWatch(plan, problem, tmp_path / "a.jsonl", report=told.append)
    other = pickle.loads(pickle.dumps(watch))
    with other.step():
        other.step_done(1.0)
        other.step_done()
    other.close()
    watch.close()
    assert not other.active and items(tmp_path / "a.jsonl") == []


_SCRIPT = """
import os, sys
import rlplace
plan, problem, out, stand_in = sys.argv[1:]
sys.executable = stand_in
watch = rlplace.StepWatch(plan, problem, out)
assert "torch" not in sys.modules and "numba" not in sys.modules
for step in range(80):
    watch.step_done(0.1 if step < 60 else 0.2)
print(watch._job.process.pid, flush=True)
child = os.fork()
if child == 0:
    for _ in range(500):
        watch.step_done(0.3)
    sys.exit(0)  # runs what is registered for the exit of the interpreter
os.waitpid(child, 0)
print(watch._job.process.poll(), flush=True)
"""


def test_forks_and_the_end_of_the_interpreter(problem, plan, tmp_path, stand_in):
    stand_in("exec sleep 100")
    problem.save(tmp_path / "x.problem.json")
    plan.save(tmp_path / "p.plan.json")
    out = tmp_path / "run.steps.jsonl"
    python = os.path.realpath("/proc/self/exe")
    done = subprocess.run(
        [python, "-c", _SCRIPT, tmp_path / "p.plan.json", tmp_path / "x.problem.json", out, tmp_path / "stand_in"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pid, still = done.stdout.split()
    assert still == "None"  # the fork did not end it
    assert not os.path.exists(f"/proc/{pid}")  # the exit did
    assert [item.step for item in items(out)] == list(range(80))


def test_a_prediction_that_is_off_from_the_start(problem, plan, tmp_path, told):
    predicted = plan.predicted["step_time_s"]
    watch = StepWatch(plan, problem, tmp_path / "a.jsonl", report=told.append, replan=False)
    for seconds in steps(2 * predicted, 100):
        watch.step_done(seconds)
    assert len(told) == 1 and "times what the plan predicts" in told[0] and watch.drifts == []
    watch.close()
    watch = StepWatch(plan, problem, tmp_path / "b.jsonl", reference="predicted", report=told.append, replan=False)
    for seconds in steps(2 * predicted, 100):
        watch.step_done(seconds)
    (drift,) = watch.drifts
    assert drift.of_reference == pytest.approx(2, rel=0.05)
    watch.close()


def test_refusals(problem, plan, tmp_path):
    out = tmp_path / "a.jsonl"
    other = random_problem(1, 16, 3)
    with pytest.raises(InputError, match="plan is for problem"):
        StepWatch(plan, other, out)
    with pytest.raises(InputError, match="cannot be read"):
        StepWatch(tmp_path / "p.plan.json", problem, out)
    with pytest.raises(InputError, match="no such file"):
        StepWatch(plan, tmp_path / "x.problem.json", out)
    with pytest.raises(InputError, match="reference"):
        StepWatch(plan, problem, out, reference="median")
    with pytest.raises(InputError, match="predicts no step time"):
        StepWatch(plan.with_predicted({}), problem, out, reference="predicted")
    with pytest.raises(InputError, match="pause_s"):
        StepWatch(plan, problem, out, pause_s=-1)
    with pytest.raises(InputError, match="least"):
        StepWatch(plan, problem, out, least=0)
    with pytest.raises(InputError, match=r"rlplace\.distribute"):
        StepWatch(plan, problem, out, model=object())
    assert not out.exists()


def test_the_callback_of_transformers(problem, plan, tmp_path, told):
    import torch
    from torch import nn
    from transformers import Trainer, TrainingArguments

    from rlplace.integrations import StepWatchCallback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            return {"loss": self.layer(x).square().mean()}

    arguments = TrainingArguments(
        str(tmp_path / "t"), max_steps=7, gradient_accumulation_steps=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, logging_strategy="steps", logging_steps=3, per_device_train_batch_size=2,
    )  # fmt: skip
    watch = StepWatch(plan, problem, tmp_path / "a.jsonl", report=told.append)
    data = [{"x": torch.ones(2)} for _ in range(32)]
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[StepWatchCallback(watch)])
    trainer.train()
    assert not watch.active
    timed = [entry for entry in trainer.state.log_history if "step_time_s" in entry]
    assert [entry["step"] for entry in timed] == [3, 6, 7]
    for entry in timed:
        assert entry["predicted_step_time_s"] == plan.predicted["step_time_s"]
        assert (
            entry["step_time_s"] == pytest.approx(entry["step_time_ratio"] * entry["predicted_step_time_s"])
            and entry["step_time_s"] > 0
        )
    assert [item.step for item in items(tmp_path / "a.jsonl")] == list(range(7))
