"""The placement program against the executor: simulated steps are its solutions, in time and in memory."""

import math

import numpy as np
import pytest

from rlplace.errors import MissingError
from rlplace.planners.dlplacer import program as program_module
from rlplace.planners.dlplacer.executor import keep_request_order, start_at_once
from rlplace.planners.dlplacer.instance import HORIZON_TICKS, choose_ticks, make_instance, transfer_seconds
from rlplace.planners.dlplacer.memory import limit_static, limit_timeline
from rlplace.planners.dlplacer.program import build_program, relabel
from rlplace.planners.dlplacer.solve import add_hint, solve_program
from rlplace.planners.dlplacer.symmetry import interchangeable
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

pytest.importorskip("ortools")


def whole_numbers(problem, seed):
    """The same graph with small whole times and bytes, so that ticks are exact and ties are common."""
    data = problem_to_dict(problem)
    rng = np.random.default_rng(seed)
    for op in data["ops"]:
        times = op["time_s"] if isinstance(op["time_s"], list) else [op["time_s"]] * len(data["devices"])
        op["time_s"] = [None if t is None else int(rng.integers(0, 5)) for t in times]
        op["temporary_bytes"] = int(rng.integers(0, 4))
    for tensor in data["tensors"]:
        tensor["bytes"] = int(rng.integers(0, 4))
    for group in data["groups"]:
        group.update(resident_bytes=int(rng.integers(0, 6)))
        for part in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            group.pop(part, None)
    count = len(data["devices"])
    data["links"]["bandwidth_bytes_per_s"] = [[0 if i == j else 1 + (i + j) % 2 for j in range(count)] for i in range(count)]
    data["links"]["latency_s"] = [[0 if i == j else int(rng.integers(0, 2)) for j in range(count)] for i in range(count)]
    return problem_from_dict(data)


def with_memory(problem, limits):
    data = problem_to_dict(problem)
    for device, limit in zip(data["devices"], limits, strict=True):
        device["memory_bytes"] = int(limit)
    return problem_from_dict(data)


def follow(problem, devices, *, rules=True, microbatches=1, static=False):
    """Status and makespan of the program when all of it is fixed to a simulated step."""
    line = simulate(problem, devices, microbatches=microbatches)
    instance = make_instance(problem, line.step_time_s, microbatches)
    program = build_program(instance, contention=True)
    limit_static(program) if static else limit_timeline(program)
    if rules:
        assert keep_request_order(program) and start_at_once(program)
    add_hint(program, line)
    fixed = [*program.start, *program.sent.values(), *(x for row in program.placed for x in row.values())]
    hints = dict(zip(program.model.proto.solution_hint.vars, program.model.proto.solution_hint.values, strict=True))
    for variable in fixed:
        if variable.index in hints:
            program.model.add(variable == hints[variable.index])
    return line, solve_program(program, hint=None, seed=0, effort=20.0, time_limit_s=math.inf)


CASES = [(seed, 2 + seed % 2, ("layered", "branchy", "chain")[seed % 3]) for seed in range(12)]


@pytest.mark.parametrize(("seed", "devices", "shape"), CASES)
def test_simulated_steps_are_solutions(seed, devices, shape):
    hosts = 2 if seed % 4 == 3 else 1
    problem = random_problem(seed, 5, devices, shape=shape, unlike=seed % 2 == 0, shared_parameters=1, hosts=hosts)
    problem = whole_numbers(problem, seed)
    plan = np.random.default_rng(seed).integers(0, devices, problem.num_groups)
    line, outcome = follow(problem, plan, microbatches=1 + seed % 2)
    assert outcome.status == "optimal" and outcome.objective_s == line.step_time_s


@pytest.mark.parametrize(("seed", "devices", "shape"), CASES[:6])
def test_simulated_steps_are_solutions_where_times_are_rounded(seed, devices, shape):
    problem = random_problem(seed, 5, devices, shape=shape, unlike=seed % 2 == 0, shared_parameters=1)
    plan = np.random.default_rng(seed).integers(0, devices, problem.num_groups)
    line = simulate(problem, plan)
    instance = make_instance(problem, line.step_time_s)
    program = build_program(instance, contention=True)
    assert keep_request_order(program) and start_at_once(program)
    names = relabel(program, plan.astype(np.int32))
    for group, device in enumerate(names[plan].tolist()):
        program.model.add(program.placed[group][device] == 1)
    outcome = solve_program(program, hint=line, seed=0, effort=20.0, time_limit_s=math.inf)
    assert outcome.objective_s <= line.step_time_s  # every order is allowed here, rounding only helps
    assert not instance.ticks.exact


def test_like_devices_may_get_a_tensor_in_any_order():
    """One sender, two readers, a device each. The later reader is the long one, and the executor sends by device number."""
    problem = build_problem(
        "fan_out", time_s=[[1.0] * 3, [1.0] * 3, [10.0] * 3], tensors=[TensorSpec(0, 4, [1, 2])], memory_bytes=[20] * 3,
        resident_bytes=[11] * 3,
    )  # fmt: skip
    data = problem_to_dict(problem)
    data["links"]["channels"] = [[[] if i == j else [2 * i, 2 * j + 1] for j in range(3)] for i in range(3)]
    problem = problem_from_dict(data)
    assert interchangeable(problem) == [[0, 1, 2]]
    for devices, step_time_s in (([0, 1, 2], 19.0), ([0, 2, 1], 15.0)):
        line, outcome = follow(problem, np.array(devices))
        assert line.step_time_s == outcome.objective_s == step_time_s and outcome.status == "optimal"


@pytest.mark.parametrize("seed", range(4))
def test_simulated_steps_of_like_devices_are_solutions(seed):
    """Every device sends one tensor at a time and receives one: names decide ties, and the program looks at one naming only."""
    data = problem_to_dict(whole_numbers(random_problem(seed, 6, 4, shape="branchy", width=5, training=False), seed))
    data["links"]["bandwidth_bytes_per_s"] = [[int(i != j) for j in range(4)] for i in range(4)]
    data["links"]["latency_s"] = [[0] * 4] * 4
    data["links"]["channels"] = [[[] if i == j else [2 * i, 2 * j + 1] for j in range(4)] for i in range(4)]
    for op in data["ops"]:
        op["time_s"] = int(np.ravel(op["time_s"])[0])
    for tensor in data["tensors"]:
        tensor["bytes"] += 1
    problem = problem_from_dict(data)
    assert interchangeable(problem) == [[0, 1, 2, 3]]
    for draw in range(3):
        plan = np.random.default_rng([seed, draw]).integers(0, 4, problem.num_groups)
        line, outcome = follow(problem, plan)
        assert outcome.status == "optimal" and outcome.objective_s == line.step_time_s


def test_memory_account_is_the_executors():
    """Limits at the simulated peaks admit the step; one byte less on a device does not."""
    refused = tried = 0
    for seed in range(8):
        problem = whole_numbers(random_problem(seed, 5, 2, shape=("layered", "branchy", "chain")[seed % 3]), seed)
        plan = np.random.default_rng(seed).integers(0, 2, problem.num_groups)
        peaks = np.maximum(simulate(problem, plan).peak_memory_bytes, 1)
        assert follow(with_memory(problem, peaks), plan)[1].status == "optimal"
        for device in np.flatnonzero(peaks > 1).tolist():
            tight = peaks.copy()
            tight[device] -= 1
            tried += 1
            refused += follow(with_memory(problem, tight), plan)[1].status == "infeasible"
    # The program does not see bytes that only exist between two events of one instant: one of the peaks here.
    assert tried == 14 and refused == 13


def test_common_units_are_found():
    ticks = choose_ticks(np.array([0.5, 1.25, 3.0, np.inf, 0.0]), 10.0)
    assert ticks.exact and ticks.per_s == 4.0
    assert ticks.down(np.array([0.5, 1.25, np.nan, np.inf])).tolist() == [2, 5, -1, -1]
    micro = choose_ticks(np.array([3e-5, 1e-3, 0.7]), 1.0)
    assert micro.exact and micro.down(np.array([3e-5, 0.7])).tolist() == [3, 70_000]
    odd = choose_ticks(np.array([0.1, math.pi]), 10.0)
    assert not odd.exact and odd.per_s == HORIZON_TICKS / 10.0
    assert odd.seconds(float(odd.down(np.array([math.pi]))[0])) == pytest.approx(math.pi, rel=1e-6)


def test_times_beyond_every_step_stay_whole_numbers_of_64_bits():
    ticks = choose_ticks(np.array([1e-9, math.pi * 1e6]), 1e-9)
    assert HORIZON_TICKS < ticks.down(np.array([math.pi * 1e6]))[0] < 1 << 42
    assert choose_ticks(np.array([math.pi, math.e]), 0.0).down(np.array([0.0, math.pi])).tolist() == [0, 3]


def test_devices_that_may_be_exchanged():
    assert interchangeable(random_problem(0, 6, 4)) == [[0, 1, 2, 3]]
    assert interchangeable(random_problem(0, 6, 4, hosts=2)) == [[0, 1], [2, 3]]
    assert interchangeable(random_problem(1, 6, 3, unlike=True)) != [[0, 1, 2]]
    data = problem_to_dict(random_problem(0, 6, 3))
    data["groups"][2]["device"] = 1
    assert interchangeable(problem_from_dict(data)) == [[0, 2]]
    data = problem_to_dict(random_problem(0, 6, 3))
    data["links"]["bandwidth_bytes_per_s"][0][1] *= 0.5
    assert interchangeable(problem_from_dict(data)) == []


def test_times_between_devices_take_tables_and_missing_links():
    problem = build_problem(
        "table", time_s=[[1.0] * 3] * 2, tensors=[TensorSpec(0, 4, [1])], memory_bytes=[None] * 3,
        bandwidth_bytes_per_s=[[0, 2, 0], [1, 0, 1], [1, 1, 0]],
    )  # fmt: skip
    sent = transfer_seconds(problem)[0]
    assert sent[0, 1] == 2.0 and sent[0, 2] == math.inf and (np.diag(sent) == 0).all()


def test_a_missing_solver_is_named(monkeypatch):
    import builtins

    real = builtins.__import__

    def refuse(name, *rest, **more):
        if name.startswith("ortools"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingError, match="pip install"):
        program_module.solver_library()
