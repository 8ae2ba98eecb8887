"""The shared repair: legal, exact, within its calls, and feasible where a feasible assignment is in reach."""

import numpy as np
import pytest
from toys import memory_tight_chain, memory_tight_pair

from rlplace.planners.common.evaluate import Deadline, Evaluator
from rlplace.planners.common.repair import legalize, repair, repair_answer
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import Simulator, simulate


@pytest.mark.parametrize("toy", [memory_tight_chain, memory_tight_pair])
def test_repair_of_everything_on_one_device(toy):
    problem = toy().problem
    start = np.zeros(problem.num_groups, dtype=np.int32)
    assert not simulate(problem, start).feasible
    fixed = repair(problem, start)
    assert fixed is not None and simulate(problem, fixed).feasible
    assert (start == 0).all()


@pytest.mark.parametrize("seed", range(10))
def test_repair_on_random_problems(seed):
    problem = random_problem(
        seed, 40, 4, shape=("layered", "branchy", "chain")[seed % 3], memory_factor=1.5, unlike=seed % 2 == 0
    )
    simulator = Simulator(problem)
    fixed = repair(problem, np.zeros(40, dtype=np.int32), simulator, max_calls=200)
    assert fixed is not None
    assert simulate(problem, fixed).feasible
    assert 0 < simulator.calls <= 200


def test_repair_leaves_feasible_assignments_alone():
    problem = random_problem(0, 20, 3)
    start = np.arange(20, dtype=np.int32) % 3
    evaluator = Evaluator(problem)
    np.testing.assert_array_equal(repair(problem, start, evaluator), start)
    assert evaluator.calls == 1


def test_repair_gives_up_within_its_calls():
    problem = build_problem("odd", time_s=[[1.0, 1.0]] * 3, tensors=[], memory_bytes=[100, 100], resident_bytes=[60, 60, 60])
    evaluator = Evaluator(problem)
    assert repair(problem, [0, 0, 0], evaluator, max_calls=7) is None
    assert evaluator.calls <= 7


def test_repair_swaps_when_no_single_move_fits():
    """Sizes 6, 5, 5, 4 on two devices of 10: from {6, 5} and {5, 4} only an exchange helps."""
    problem = build_problem("swap", time_s=[[1.0, 1.0]] * 4, tensors=[], memory_bytes=[10, 10], resident_bytes=[6, 5, 5, 4])
    fixed = repair(problem, [0, 0, 1, 1])
    assert fixed is not None
    assert sorted(problem.resident_bytes[fixed == fixed[0]].tolist()) == [4, 6]


def test_the_exchange_that_frees_just_enough_comes_first():
    """Three bytes are missing: 13 for 10 frees them and fits exactly, 13 for 11 frees two, 13 for 5 does not fit."""
    resident = [13, 10, 5, 10, 11, 11]
    problem = build_problem("exact", time_s=[[1.0, 1.0]] * 6, tensors=[], memory_bytes=[20, 40], resident_bytes=resident)
    evaluator = Evaluator(problem)
    assert repair(problem, [0, 0, 1, 1, 1, 1], evaluator).tolist() == [1, 0, 1, 0, 1, 1]
    assert evaluator.calls == 4  # as it is, both single moves, the exchange


def test_what_does_not_lower_the_overflow_is_not_kept():
    problem = build_problem("odd", time_s=[[1.0, 1.0]] * 3, tensors=[], memory_bytes=[100, 100], resident_bytes=[60, 60, 60])
    evaluator = Evaluator(problem)
    assert repair(problem, [0, 0, 0], evaluator) is None
    assert evaluator.calls < 10


def test_one_call_or_no_time_look_at_the_start_alone():
    problem = memory_tight_chain().problem
    start = np.zeros(problem.num_groups, dtype=np.int32)
    for max_calls, seconds in ((1, None), (100, 0.0)):
        evaluator, deadline = Evaluator(problem), Deadline(seconds)
        deadline.secured = True  # no time beyond the limit
        answer = repair_answer(problem, start, evaluator, deadline, max_calls=max_calls)
        assert evaluator.calls == 1 and answer.devices.tolist() == start.tolist() and not answer.score.feasible


def test_legalize_respects_null_times_and_fixed_devices():
    data = problem_to_dict(random_problem(1, 12, 3, null_fraction=0.5))
    problem = problem_from_dict(data)
    free = int(np.flatnonzero(problem.group_allowed.all(axis=1))[0])
    data["groups"][free]["device"] = 2
    problem = problem_from_dict(data)
    for device in range(3):
        start = np.full(12, device)
        legal = legalize(problem, start)
        assert problem.group_allowed[np.arange(12), legal].all()
        assert legal[free] == 2
        unmoved = problem.group_allowed[:, device]
        np.testing.assert_array_equal(legal[unmoved], start[unmoved])


def test_legalize_avoids_missing_links():
    """Devices 0 and 1 cannot talk; the chain that lies across them is drawn together."""
    problem = build_problem("islands", time_s=[[1.0, 1.0]] * 4, tensors=[TensorSpec(i, 4, [i + 1]) for i in range(3)],
                            memory_bytes=[None] * 2, bandwidth_bytes_per_s=[[0, 0], [0, 0]])  # fmt: skip
    legal = legalize(problem, [0, 0, 1, 1])
    assert simulate(problem, legal).feasible
