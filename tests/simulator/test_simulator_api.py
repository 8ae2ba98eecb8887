"""What `simulate`, `simulate_many` and `Simulator` accept, refuse and promise around the executor."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.plan import make_plan
from rlplace.problem import Problem
from rlplace.problem.build import build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import Simulator, Timeline, default_priority, simulate, simulate_many, trace_events, write_trace
from tests.toys import memory_tight_pair, two_branches


@pytest.fixture
def problem() -> Problem:
    return random_problem(3, 12, 3, shared_parameters=2)


def test_a_plan_brings_its_own_priority_and_order(problem: Problem) -> None:
    devices = np.arange(12) % 3
    priority = np.arange(problem.num_ops, dtype=np.float64)
    by_priority = make_plan(problem, devices, planner="test", priority=priority)
    assert simulate(problem, by_priority).end_s.tolist() == simulate(problem, devices, priority=priority).end_s.tolist()
    assert simulate(problem, by_priority).end_s.tolist() != simulate(problem, devices).end_s.tolist()
    host = devices[problem.op_group]
    order = [[op for op in problem.topological_order.tolist() if host[op] == device] for device in range(3)]
    by_order = make_plan(problem, devices, planner="test", order=order)
    assert simulate(problem, by_order).end_s.tolist() == simulate(problem, devices, order=order).end_s.tolist()
    given = simulate(problem, by_order, priority=priority)
    assert given.end_s.tolist() == simulate(problem, by_priority).end_s.tolist()


def test_replaying_a_timeline_as_an_order_gives_the_timeline(problem: Problem) -> None:
    devices = np.arange(12) % 3
    line = simulate(problem, devices)
    begun = np.lexsort((np.arange(problem.num_ops), line.end_s, line.start_s))
    order = [[int(op) for op in begun if line.device_of_op[op] == device] for device in range(3)]
    again = simulate(problem, devices, order=order)
    assert again.end_s.tolist() == line.end_s.tolist()
    assert again.peak_memory_bytes.tolist() == line.peak_memory_bytes.tolist()


def test_a_plan_for_another_problem_is_refused(problem: Problem) -> None:
    with pytest.raises(InputError, match="plan is for problem"):
        simulate(problem, make_plan(random_problem(4, 12, 3), [0] * 12, planner="test"))


@pytest.mark.parametrize("devices", [[0] * 11, [[0] * 12], [3] + [0] * 11, [-1] + [0] * 11, [0.5] * 12, ["0"] * 12, 0])
def test_malformed_assignments_are_refused(problem: Problem, devices: Any) -> None:
    with pytest.raises(InputError, match="device_of_group"):
        simulate(problem, devices)


@pytest.mark.parametrize("devices", [[[0] * 11], [0] * 12, [[3] + [0] * 11], [[0] * 12, [0] * 11]])
def test_malformed_batches_are_refused(problem: Problem, devices: Any) -> None:
    with pytest.raises(InputError, match="device_of_group"):
        simulate_many(problem, devices)


def test_malformed_priorities_and_orders_are_refused(problem: Problem) -> None:
    with pytest.raises(InputError, match="priority: expected 36"):
        simulate(problem, [0] * 12, priority=[1.0])
    with pytest.raises(InputError, match="finite"):
        simulate(problem, [0] * 12, priority=[np.nan] * 36)
    with pytest.raises(InputError, match="order excludes priority"):
        simulate(problem, [0] * 12, priority=[1.0] * 36, order=[list(range(36)), [], []])
    with pytest.raises(InputError, match="permutation"):
        simulate(problem, [0] * 12, order=[list(range(35)), [], []])


def test_evaluate_refuses_what_it_can_see_and_stays_usable(problem: Problem) -> None:
    simulator = Simulator(problem)
    for bad in ([0] * 11, [3] + [0] * 11, [-1] + [0] * 11):
        with pytest.raises(InputError):
            simulator.evaluate(bad)
    line = simulate(problem, np.arange(12) % 3)
    assert simulator.evaluate(np.arange(12) % 3) == (line.step_time_s, 0.0)
    assert simulator.evaluate((np.arange(12) % 3).tolist())[0] == line.step_time_s
    assert simulator.busy_s.tolist() == line.busy_s.tolist()


def test_overflow_is_relative_to_each_limit() -> None:
    problem = memory_tight_pair().problem
    step, overflow = Simulator(problem).evaluate([0, 0])
    assert step == 2.0 and overflow == pytest.approx((15 - 10) / 10)  # 12 resident and 3 bytes of activation
    assert Simulator(problem).evaluate([0, 1]) == (5.0, 0.0)


def test_a_step_that_cannot_complete_is_inf_nan_and_none() -> None:
    problem = build_problem("null", time_s=[[1.0, np.nan]], tensors=[], memory_bytes=[None, None], resident_bytes=[5])
    assert Simulator(problem).evaluate([1]) == (np.inf, 0.0)
    batch = simulate_many(problem, [[0], [1]])
    assert batch.feasible.tolist() == [True, False] and np.isnan(batch.step_time_s[1])
    assert batch.step_time_s[0] == 1.0 and batch.peak_memory_bytes[1].tolist() == [0, 5]
    line = simulate(problem, [1])
    transfers = ("transfer_tensor", "transfer_source", "transfer_destination", "transfer_start_s", "transfer_end_s")
    assert all(len(getattr(line, name)) == 0 for name in transfers)
    assert len(simulate_many(problem, np.zeros((0, 1), dtype=int)).feasible) == 0
    assert len(simulate_many(problem, np.zeros((0, 1))).feasible) == 0  # no numbers, so none of the wrong kind
    with pytest.raises(InputError, match="whole numbers"):
        simulate(problem, [0.5])


def test_groups_off_their_fixed_device_are_infeasible() -> None:
    problem = dataclasses.replace(two_branches().problem, group_device=np.array([1, -1, -1, -1, -1, -1, -1], dtype=np.int32))
    line = simulate(problem, [0] * 7)
    assert line.step_time_s == 7.0 and not line.feasible and "may only sit on gpu1" in line.violations[0]
    assert simulate_many(problem, [[0] * 7, [1] * 7]).feasible.tolist() == [False, True]


def test_results_do_not_share_memory_with_later_simulations(problem: Problem) -> None:
    first = simulate(problem, np.arange(12) % 3)
    kept = {item.name: np.copy(getattr(first, item.name)) for item in dataclasses.fields(Timeline)}
    simulate(problem, [0] * 12)
    simulate(problem, [0] * 12)
    for name, value in kept.items():
        assert np.array_equal(getattr(first, name), value), name


def test_threads_do_not_disturb_each_other(problem: Problem) -> None:
    plans = np.random.default_rng(0).integers(0, 3, (200, 12))
    wanted = simulate_many(problem, plans).step_time_s.tolist()
    found: dict[int, list[float | None]] = {}

    def work(number: int) -> None:
        found[number] = [simulate(problem, plan).step_time_s for plan in plans]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number] == wanted for number in range(4))


def test_lowered_arrays_go_with_their_problem() -> None:
    problem = random_problem(5, 6, 2)
    simulate(problem, [0] * 6)
    gone = weakref.ref(problem)
    del problem
    gc.collect()
    assert gone() is None


def test_arrays_of_any_integer_type_or_layout_are_lowered_alike(problem: Problem) -> None:
    other = dataclasses.replace(
        problem,
        time_s=np.asfortranarray(problem.time_s),
        consumers=problem.consumers.astype(np.int64),
        op_group=problem.op_group.astype(np.int64),
        tensor_producer=problem.tensor_producer.astype(np.int64),
    )
    plan = np.arange(12) % 3
    assert simulate(other, plan).end_s.tolist() == simulate(problem, plan).end_s.tolist()
    assert (default_priority(other) == default_priority(problem)).all()


def test_trace_has_a_span_for_every_task_and_transfer(problem: Problem, tmp_path: Path) -> None:
    line = simulate(problem, np.arange(12) % 3)
    path = tmp_path / "step.json"
    write_trace(problem, line, path)
    data = json.loads(path.read_text())
    spans = [event for event in data["traceEvents"] if event["ph"] == "X"]
    tasks = [event for event in spans if event["pid"] == 1]
    moves = [event for event in spans if event["pid"] == 2]
    assert sorted(event["name"] for event in tasks) == sorted(problem.op_names)
    assert len(moves) == len(line.transfer_tensor) > 0
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(line.step_time_s * 1e6)
    busy = [sum(event["dur"] for event in tasks if event["tid"] == device) for device in range(3)]
    assert busy == pytest.approx((line.busy_s * 1e6).tolist())
    tracks = {event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"}
    assert {"gpu0", "gpu1", "gpu2"} < tracks and any(" to " in name for name in tracks)
    assert trace_events(problem, line) == data["traceEvents"]


def test_trace_of_a_step_that_cannot_complete_is_refused(tmp_path: Path) -> None:
    problem = build_problem("null", time_s=[[1.0, np.nan]], tensors=[], memory_bytes=[None, None])
    with pytest.raises(InputError, match="does not complete"):
        write_trace(problem, simulate(problem, [1]), tmp_path / "step.json")
    assert not list(tmp_path.iterdir())
