"""cp_sat and dlplacer: proven optima, brute force, memory, symmetry, contract."""

import functools
import itertools
import math
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rlplace.errors import InfeasibleError, InputError
from rlplace.placement import get_planner
from rlplace.placement.common.bounds import lower_bounds
from rlplace.placement.published.dlplacer.instance import make_instance
from rlplace.placement.published.dlplacer.program import PlacementProgram
from rlplace.placement.published.dlplacer.solve import solve_program
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests import toys

pytest.importorskip("ortools")


@pytest.mark.parametrize(("devices", "optimum"), [(2, 13.0), (3, 12.0)])
@pytest.mark.parametrize("planner", ["cp_sat", "dlplacer"])
def test_pardnn_toy_is_solved_and_proven(planner, devices, optimum):
    plan = get_planner(planner)(toys.pardnn_example(devices))
    assert plan.predicted.step_time_s == optimum
    proof = plan.predicted.proof
    assert proof["status"] == "optimal" and proof["lower_bound_s"] == optimum and proof["gap"] == 0.0
    assert simulate(toys.pardnn_example(devices), plan).step_time_s == optimum


@pytest.mark.parametrize("planner", ["heft", "m_etf"])
def test_list_schedulers_reach_13_on_the_pardnn_example(planner):
    assert get_planner(planner)(toys.pardnn_example(2)).predicted.step_time_s == 13.0


@pytest.mark.parametrize("name", toys.TOYS)
@pytest.mark.parametrize("planner", ["cp_sat", "dlplacer"])
def test_known_optima_are_proven(planner, name):
    problem, optimum, _ = toys.TOYS[name]()
    plan = get_planner(planner)(problem)
    assert plan.predicted.step_time_s == pytest.approx(optimum)
    assert plan.predicted.proof["status"] == "optimal"
    assert plan.predicted.proof["lower_bound_s"] <= optimum * (1 + 1e-9)
    if planner == "cp_sat":
        assert plan.predicted.proof["lower_bound_s"] == pytest.approx(optimum)


def random_graph(seed, count, devices):
    """Returns ops of 1 to 5 seconds and edges of 0 to 4 seconds, every op a group."""
    rng = np.random.default_rng(seed)
    tensors = [
        TensorSpec(a, int(rng.integers(0, 5)), [b]) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.3
    ]
    times = [[float(t)] * devices for t in rng.integers(1, 6, count)]
    return build_problem(f"graph{seed}", time_s=times, tensors=tensors, memory_bytes=[None] * devices)


def brute_force(problem):
    """Returns the smallest makespan over all assignments and orders, by branch and bound, transfers without contention."""
    count, devices = problem.num_ops, problem.num_devices
    time = problem.time_s[:, 0].tolist()
    inputs = [[] for _ in range(count)]
    for tensor, op in zip(problem.edge_tensor.tolist(), problem.consumers.tolist(), strict=True):
        inputs[op].append((int(problem.tensor_producer[tensor]), float(problem.tensor_bytes[tensor])))
    tail = [0.0] * count
    for op in reversed(range(count)):
        for producer, _ in inputs[op]:
            tail[producer] = max(tail[producer], tail[op] + time[op])
    best = sum(time)

    def extend(end, place, free):
        nonlocal best
        if len(end) == count:
            best = min(best, max(end.values()))
            return
        for op in range(count):
            if op in end or any(p not in end for p, _ in inputs[op]):
                continue
            for device in range(min(devices, len(set(place.values())) + 1)):  # devices are alike
                ready = max((end[p] + (c if place[p] != device else 0.0) for p, c in inputs[op]), default=0.0)
                done = max(ready, free[device]) + time[op]
                # Ops start in the order of the search, so that a schedule is looked at once.
                if done + tail[op] < best and done - time[op] >= max((end[o] - time[o] for o in end), default=0.0):
                    after = (*free[:device], done, *free[device + 1 :])
                    extend({**end, op: done}, {**place, op: device}, after)

    extend({}, {}, (0.0,) * devices)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_program_without_contention_equals_brute_force(seed):
    problem = random_graph(seed, 6 + seed % 5, 2 + seed % 2)
    optimum = brute_force(problem)
    hint = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32))
    program = PlacementProgram(make_instance(problem, hint.step_time_s), contention=False)
    outcome = solve_program(program, hint=hint, seed=seed, effort=20.0, time_limit_s=math.inf)
    assert outcome.status == "optimal" and outcome.objective_s == optimum


@pytest.mark.parametrize("seed", range(6))
def test_cp_sat_equals_the_best_of_all_assignments_and_orders(seed):
    """The executor itself, on every assignment with every order of the ops on each device, with its queues for links."""
    problem = random_graph(seed + 100, 5, 2)
    data = problem_to_dict(problem)
    for device in data["devices"] if seed % 2 else []:
        device["memory_bytes"] = 9
    for group in data["groups"]:
        group.update(resident_bytes=1)
    problem = problem_from_dict(data)
    optimum = math.inf
    for devices in itertools.product(range(2), repeat=problem.num_groups):
        rows = [[op for op, d in enumerate(devices) if d == device] for device in range(2)]
        for first, second in itertools.product(*(itertools.permutations(row) for row in rows)):
            line = simulate(problem, list(devices), order=[list(first), list(second)])
            if line.feasible:
                optimum = min(optimum, line.step_time_s)
    plan = get_planner("cp_sat")(problem)
    assert plan.predicted.step_time_s == optimum
    assert plan.predicted.proof["status"] == "optimal"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 4, 8, 9])
def test_training_steps_of_ten_groups_are_proven(seed):
    problem = random_problem(
        seed, 10, 2 + seed % 2, shape=("layered", "branchy", "chain")[seed % 3], unlike=seed % 2 == 1,
        memory_factor=(None, 1.5, 1.2)[seed % 3], shared_parameters=seed % 2, comm_ratio=(0.3, 1.0)[seed % 2],
    )  # fmt: skip
    plan = get_planner("cp_sat")(problem, seed=seed)
    proof = plan.predicted.proof
    assert proof["status"] == "optimal" and not proof["exact_times"]
    step = plan.predicted.step_time_s
    assert step == simulate(problem, plan).step_time_s and simulate(problem, plan).feasible
    assert lower_bounds(problem).step_time_s <= proof["lower_bound_s"] * (1 + 1e-6)
    for name in ("best", "annealing"):
        assert get_planner(name)(problem).predicted.step_time_s >= proof["lower_bound_s"]
    floor = get_planner("best")(problem).predicted.step_time_s
    assert step == floor if seed == 2 else step < floor  # the others leave room


@pytest.mark.parametrize("planner", ["cp_sat", "dlplacer"])
def test_a_step_that_takes_no_time_is_optimal(planner):
    problem = build_problem(
        "idle", time_s=[[0.0, math.pi]] * 3, tensors=[TensorSpec(0, 1, [1])], memory_bytes=[None, None], latency_s=math.e
    )
    plan = get_planner(planner)(problem)
    assert plan.predicted.step_time_s == 0.0 and plan.predicted.proof["status"] == "optimal"


def test_infeasibility_is_proven():
    """Three groups of 6 bytes on two devices of 10: 18 bytes are less than 20, but no two fit together."""
    problem = build_problem(
        "full", time_s=[[1.0, 1.0]] * 3, tensors=[], memory_bytes=[10, 10], resident_bytes=[6, 6, 6]
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match="proved that no plan fits"):
        get_planner("cp_sat")(problem)
    with pytest.raises(InfeasibleError, match="dlplacer found no plan that fits"):
        get_planner("dlplacer")(problem)


def test_large_problems_are_refused_with_the_limit():
    with pytest.raises(InputError, match=r"300 ops, the limit is 200; use planner 'dlplacer'"):
        get_planner("cp_sat")(random_problem(0, 100, 2))
    with pytest.raises(InputError, match="the limit is 12"):
        get_planner("cp_sat")(random_problem(0, 5, 2), max_tasks=12)


@pytest.mark.slow
def test_an_interrupt_ends_the_planner():
    """The solver holds the interpreter for seconds; Ctrl-C must not turn into an answer."""
    code = (
        "import ortools.sat.python.cp_model\n"  # what is interrupted is the solver, not its import
        "from rlplace.placement import get_planner\n"
        "from rlplace.problem.generate import random_problem\n"
        "problem = random_problem(3, 40, 3, shape='layered')\n"
        "get_planner('best')(problem)\n"
        "print('ready', flush=True)\n"
        "get_planner('cp_sat')(problem, effort=1000)\n"
        "print('answered', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a background job inherits SIG_IGN
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert "answered" not in out and "KeyboardInterrupt" in err
