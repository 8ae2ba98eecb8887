"""The program of dlplacer and cp_sat admits what the executor does; coarsening keeps work; no plan is worse than the floor."""

import math

import numpy as np
import pytest

from rlplace.errors import InputError, MissingError
from rlplace.placement import get_planner
from rlplace.placement.published.dlplacer import program as program_module
from rlplace.placement.published.dlplacer.coarsen import coarsen, contract_groups
from rlplace.placement.published.dlplacer.constraints import (
    keep_request_order,
    limit_static,
    limit_timeline,
    start_at_once,
)
from rlplace.placement.published.dlplacer.instance import (
    HORIZON_TICKS,
    choose_ticks,
    interchangeable,
    make_instance,
    transfer_seconds,
)
from rlplace.placement.published.dlplacer.program import PlacementProgram, relabel
from rlplace.placement.published.dlplacer.solve import add_hint, solve_program
from rlplace.problem import FORWARD, problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.problem.order import topological_order
from rlplace.simulator import simulate

pytest.importorskip("ortools")


def whole_numbers(problem, seed):
    """Returns the same graph with small whole times and bytes, so that ticks are exact and ties are common."""
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


def follow(problem, devices, *, rules=True, static=False):
    """Status and makespan of the program when all of it is fixed to a simulated step."""
    line = simulate(problem, devices)
    instance = make_instance(problem, line.step_time_s)
    program = PlacementProgram(instance, contention=True)
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
    line, outcome = follow(problem, plan)
    assert outcome.status == "optimal" and outcome.objective_s == line.step_time_s


@pytest.mark.parametrize(("seed", "devices", "shape"), CASES[:6])
def test_simulated_steps_are_solutions_where_times_are_rounded(seed, devices, shape):
    problem = random_problem(seed, 5, devices, shape=shape, unlike=seed % 2 == 0, shared_parameters=1)
    plan = np.random.default_rng(seed).integers(0, devices, problem.num_groups)
    line = simulate(problem, plan)
    instance = make_instance(problem, line.step_time_s)
    program = PlacementProgram(instance, contention=True)
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


BRANCHES = ((2.0,), (0.7, 2.0), (0.7, 1.5, 1.5), (0.3, 0.8))
"""Times of the ops of an Inception block's branches, relative to each other as the FLOPs of its convolutions."""


def inception_like(devices, blocks=3, stem=6.0):
    """Returns a stem and blocks of four branches; a block's input takes 2.5 to another device, other tensors 1."""
    times, edges = [stem], {}

    def add(seconds, sources, size):
        times.append(seconds)
        for source in sources:
            edges.setdefault((source, size), []).append(len(times) - 1)
        return len(times) - 1

    last = 0
    for _ in range(blocks):
        ends = []
        for branch in BRANCHES:
            op = add(branch[0], [last], 25)
            for seconds in branch[1:]:
                op = add(seconds, [op], 10)
            ends.append(op)
        last = add(0.1, ends, 10)
    tensors = [TensorSpec(source, size, readers) for (source, size), readers in edges.items()]
    return build_problem(
        "inception", time_s=[[t] * devices for t in times], tensors=tensors, memory_bytes=[None] * devices,
        bandwidth_bytes_per_s=10.0,
    )  # fmt: skip


def step(problem, planner="dlplacer", **options):
    return get_planner(planner)(problem, **options).predicted.step_time_s


@pytest.mark.slow
def test_branches_gain_on_two_devices_and_little_more_on_four():
    single = step(inception_like(2), "single")
    two = get_planner("dlplacer")(inception_like(2))
    assert two.predicted.proof["status"] == "optimal"
    ratio = single / two.predicted.step_time_s
    assert 1.15 <= ratio <= 1.45
    assert 1.0 <= step(inception_like(2)) / step(inception_like(4), effort=4.0) <= 1.15


def test_a_chain_gains_exactly_nothing():
    chain = random_problem(3, 12, 2, shape="layered", width=1, training=False)  # a layer of width one is one group
    plan = get_planner("dlplacer")(chain)
    assert plan.predicted.step_time_s == step(chain, "single")
    assert len(set(plan.device_of_group.tolist())) == 1
    assert plan.predicted.proof["status"] == "optimal"


@pytest.mark.parametrize("shape", ["layered", "branchy", "chain"])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_coarse_graphs_are_small_and_acyclic(shape, count):
    problem = random_problem(5, 60, 3, shape=shape, memory_factor=None, shared_parameters=2)
    node = coarsen(problem, count)
    assert node.max() + 1 <= count and sorted(set(node.tolist())) == list(range(node.max() + 1))
    producer = problem.tensor_producer[problem.edge_tensor]
    forward = (producer >= 0) & (problem.op_phase[problem.consumers] == FORWARD)
    source, target = node[problem.op_group[producer[forward]]], node[problem.op_group[problem.consumers[forward]]]
    apart = source != target
    assert topological_order(source[apart], target[apart], node.max() + 1)[1] is None


def test_small_problems_are_left_alone_and_no_groups_are_refused():
    problem = random_problem(0, 12, 2)
    coarse, part = contract_groups(problem, coarsen(problem, 12))
    assert coarse is problem and part.tolist() == list(range(problem.num_ops))
    with pytest.raises(InputError, match="groups"):
        get_planner("dlplacer")(problem, groups=0)


def test_groups_that_exclude_each_other_stay_apart():
    free = random_problem(2, 30, 3, shape="chain", null_fraction=0.3)
    data = problem_to_dict(free)
    first, second = next((g, g + 1) for g in range(29) if free.group_allowed[g, 1] and free.group_allowed[g + 1, 2])
    data["groups"][first]["device"], data["groups"][second]["device"] = 1, 2
    problem = problem_from_dict(data)
    node = coarsen(problem, 6)
    coarse, _ = contract_groups(problem, node)
    assert coarse.group_device[node[first]] == 1 and coarse.group_device[node[second]] == 2
    assert coarse.group_allowed.any(axis=1).all()
    for number in range(coarse.num_groups):
        assert (coarse.group_allowed[number] == problem.group_allowed[node == number].all(axis=0)).all()


def test_joined_groups_fit_a_device():
    problem = random_problem(2, 60, 4, memory_factor=1.3)
    node = coarsen(problem, 16)
    size = np.bincount(node, weights=problem.resident_bytes)
    joined = np.bincount(node) > 1
    assert size[joined].max() <= problem.memory_limit_bytes.max() / 3


@pytest.mark.parametrize("seed", range(4))
def test_the_coarse_problem_keeps_work_bytes_and_traffic(seed):
    problem = random_problem(seed, 40, 2, unlike=True, shared_parameters=2)
    node = coarsen(problem, 10)
    coarse, part = contract_groups(problem, node)
    np.testing.assert_allclose(coarse.time_s.sum(axis=0), problem.time_s.sum(axis=0))
    assert coarse.resident_bytes.sum() == problem.resident_bytes.sum()
    assert (coarse.op_phase[part] == problem.op_phase).all() and (coarse.op_group[part] == node[problem.op_group]).all()
    devices = np.random.default_rng(seed).integers(0, 2, coarse.num_groups)
    fine, rough = simulate(problem, devices[node]), simulate(coarse, devices)
    assert rough.busy_s.sum() == pytest.approx(fine.busy_s.sum())
    assert (rough.transfer_end_s - rough.transfer_start_s).sum() == pytest.approx(
        (fine.transfer_end_s - fine.transfer_start_s).sum()
    )


def test_ops_that_would_wait_for_each_other_are_not_joined():
    """Groups 0 and 2 join, and 1 lies between them: their forward ops stay two."""
    problem = build_problem(
        "sandwich", time_s=[[1.0, 1.0]] * 4, tensors=[TensorSpec(0, 1, [1]), TensorSpec(1, 1, [2]), TensorSpec(2, 1, [3])],
        memory_bytes=[None, None],
    )  # fmt: skip
    coarse, part = contract_groups(problem, np.array([0, 1, 0, 0], dtype=np.int32))
    assert coarse.num_groups == 2 and part[0] != part[2]
    assert simulate(coarse, [0, 1]).step_time_s == 6.0 and simulate(coarse, [0, 0]).step_time_s == 4.0


@pytest.mark.parametrize("setting", [{"num_devices": 2}, {"num_devices": 3, "memory_factor": 1.4, "unlike": True}])
def test_plans_of_coarse_graphs_are_never_worse_than_the_floor(setting):
    problem = random_problem(1, 40, shape="branchy", **setting)
    plan = get_planner("dlplacer")(problem, groups=12, effort=1.0)
    line = simulate(problem, plan)
    assert line.feasible and line.step_time_s == plan.predicted.step_time_s
    assert line.step_time_s <= step(problem, "best")
    proof = plan.predicted.proof
    assert proof["program"] == "coarse" and proof["nodes"] == 12 and proof["status"] in ("optimal", "feasible")
    assert 0.0 <= proof["gap"] < 1.0 and proof["lower_bound_s"] <= proof["objective_s"]
