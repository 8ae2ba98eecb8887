"""The shared repair, the order of plans for all searches, and optima that searches reach."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from rlplace import budget
from rlplace.budget import Budget
from rlplace.compiled import entry
from rlplace.envs.instance import infeasible_reward, log_ratio, score
from rlplace.placement import ONE_SHOT, get_planner
from rlplace.placement.common import floor, kernels
from rlplace.placement.common.bounds import lower_bounds
from rlplace.placement.common.evaluate import PlanEvaluator, Score, objective_s
from rlplace.placement.common.floor import best_of, device_subsets
from rlplace.placement.common.groupgraph import group_graph, traffic
from rlplace.placement.common.repair import legalize, repair, repair_answer
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import Simulator, simulate, simulate_many
from tests import toys
from tests.toys import memory_tight_chain, memory_tight_pair


@pytest.mark.parametrize("toy", [memory_tight_chain, memory_tight_pair])
def test_repair_of_everything_on_one_device(toy):
    problem = toy().problem
    start = np.zeros(problem.num_groups, dtype=np.int32)
    assert not simulate(problem, start).feasible
    assert simulate(problem, repair(problem, start)).feasible
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


def test_what_is_slower_than_a_known_plan_is_not_repaired():
    problem = memory_tight_chain().problem
    start = np.zeros(problem.num_groups, dtype=np.int32)
    step_s = simulate(problem, start).step_time_s
    for known_s, feasible in ((math.inf, True), (1.01 * step_s, True), (0.99 * step_s, False)):
        evaluator = PlanEvaluator(problem)
        answer = best_of(evaluator, [start], known_s=known_s)
        assert answer.score.feasible is feasible
        assert (evaluator.budget.used > 1) is feasible


@pytest.mark.parametrize(("limit_s", "made"), [(10.0, 4), (3.6, 4), (3.4, 3), (2.4, 2), (0.5, 1)])
def test_candidates_end_before_one_that_would_be_late(monkeypatch, limit_s, made):
    """A candidate takes a second; the last may be half a second late."""
    problem, now_s, yielded = random_problem(1, 12, 2), [0.0], []
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def candidates():
        for device in range(4):
            now_s[0] += 1.0
            yielded.append(device)
            yield np.arange(12, dtype=np.int32) // (device + 1) % 2

    best_of(PlanEvaluator(problem, Budget(seconds=limit_s)), candidates())
    assert len(yielded) == made


def test_large_problems_leave_out_devices_that_cannot_hold_the_model(monkeypatch):
    problem = random_problem(0, 40, 6, memory_factor=1.5)
    assert [len(subset) for subset in device_subsets(problem)] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(floor, "LARGE_OPS", 0)
    held = [problem.memory_limit_bytes[subset].sum() for subset in device_subsets(problem)]
    assert 0 < len(held) < 6 and min(held) >= problem.resident_bytes.sum()


def test_repair_leaves_feasible_assignments_alone():
    problem = random_problem(0, 20, 3)
    start = np.arange(20, dtype=np.int32) % 3
    evaluator = PlanEvaluator(problem)
    np.testing.assert_array_equal(repair(problem, start, evaluator), start)
    assert evaluator.budget.used == 1


@pytest.mark.parametrize(("max_calls", "used"), [(7, 7), (400, 9)])
def test_repair_gives_up_within_its_calls_and_keeps_nothing_that_does_not_help(max_calls, used):
    problem = build_problem("odd", time_s=[[1.0, 1.0]] * 3, tensors=[], memory_bytes=[100, 100], resident_bytes=[60, 60, 60])
    evaluator = PlanEvaluator(problem)
    assert repair(problem, [0, 0, 0], evaluator, max_calls=max_calls) is None
    assert evaluator.budget.used <= used


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
    evaluator = PlanEvaluator(problem)
    assert repair(problem, [0, 0, 1, 1, 1, 1], evaluator).tolist() == [1, 0, 1, 0, 1, 1]
    assert evaluator.budget.used == 4  # as it is, both single moves, the exchange


def test_one_call_or_no_time_look_at_the_start_alone():
    problem = memory_tight_chain().problem
    start = np.zeros(problem.num_groups, dtype=np.int32)
    for max_calls, seconds in ((1, None), (100, 0.0)):
        evaluator = PlanEvaluator(problem, Budget(seconds=seconds))
        evaluator.budget.secured = True  # no time beyond the limit
        answer = repair_answer(evaluator, start, max_calls=max_calls)
        assert evaluator.budget.used == 1 and answer.devices.tolist() == start.tolist() and not answer.score.feasible


@pytest.mark.parametrize("seed", range(4))
def test_groups_leave_a_full_device_by_least_added_time_per_byte(seed):
    """Held to the rule, followed group by group in plain Python."""
    problem = random_problem(seed, 60, 4, unlike=seed % 2 == 1, null_fraction=0.1)
    graph, t = group_graph(problem), traffic(problem)
    devices = legalize(problem, np.random.default_rng(seed).integers(0, 2, 60))
    latency, inverse = t.latency, t.inverse
    load, room = np.bincount(devices, graph.time_s[np.arange(60), devices], 4), np.full(4, 0.2 * graph.footprint_bytes.sum())
    need = 0.6 * graph.footprint_bytes[devices == 0].sum()
    made = kernels.Loads(devices.copy(), load.copy(), room.copy())
    moved = kernels.shed(0, need, made, graph.footprint_bytes, graph.time_s, t)

    def sent_s(group, where):
        ends = [(e, s, d) for e, (s, d) in enumerate(zip(graph.source, graph.target, strict=True)) if group in (s, d)]
        at = {group: where}
        pairs = [(e, at.get(s, devices[s]), at.get(d, devices[d])) for e, s, d in ends]
        return sum(graph.edge_count[e] * latency[a, b] + graph.edge_bytes[e] * inverse[a, b] for e, a, b in pairs if a != b)

    for _ in range(moved):
        prices = {}
        for group in np.flatnonzero((devices == 0) & (graph.footprint_bytes > 0)):
            size = graph.footprint_bytes[group]
            for d in range(1, 4):
                if np.isfinite(graph.time_s[group, d]) and room[d] >= size:
                    added = sent_s(group, d) - sent_s(group, 0) + graph.time_s[group, d] - graph.time_s[group, 0]
                    added += max(0.0, load[d] + graph.time_s[group, d] - load.max())
                    prices.setdefault(added / min(size, need) if added > 0 else added * min(size, need), (group, d))
        group, d = prices[min(prices)]
        devices[group], need = d, need - graph.footprint_bytes[group]
        load += np.eye(4)[d] * graph.time_s[group, d] - np.eye(4)[0] * graph.time_s[group, 0]
        room += (np.eye(4)[0] - np.eye(4)[d]) * graph.footprint_bytes[group]
    assert moved > 8 and made.devices.tolist() == devices.tolist()
    assert made.seconds == pytest.approx(load) and made.room == pytest.approx(room)


def test_what_is_far_from_fitting_is_given_up_before_exact_tries():
    """100 groups of 10 bytes, 90 places for them: no estimate helps, and 20 exact tries would not."""
    problem = build_problem(
        "far", time_s=[[1.0, 1.0]] * 1000, tensors=[], memory_bytes=[4600, 4600], resident_bytes=[10] * 1000
    )
    evaluator = PlanEvaluator(problem)
    assert not repair_answer(evaluator, np.arange(1000, dtype=np.int32) % 2).score.feasible
    assert evaluator.budget.used <= 3


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


# From best to worst: (step time, overflow).
ORDER = [(1e-9, 0.0), (2.0, 0.0), (1e6, 0.0), (1e6, 1e-9), (1e-9, 0.02), (5.0, 0.5), (1e-9, 40.0), (math.inf, 0.0)]


def test_the_order_of_plans():
    values = [objective_s(*outcome) for outcome in ORDER]
    assert values == sorted(set(values)) == [Score(*outcome).objective_s for outcome in ORDER]
    assert objective_s(math.inf, 3.0) == math.inf and objective_s(2.0, 0.0) == 2.0


def test_compiled_loops_use_the_same_function():
    from rlplace.placement.annealing import _objective_s

    @entry
    def compiled(step_s, overflow):
        return _objective_s(step_s, overflow)

    assert [compiled(*outcome) for outcome in ORDER] == [objective_s(*outcome) for outcome in ORDER]


@pytest.mark.parametrize("reference_s", [1e-3, 1.0, 50.0])
def test_rewards_are_in_that_order_too(reference_s):
    scores = [score(*outcome, reference_s) for outcome in ORDER]
    assert scores == sorted(scores) and scores[-2] < scores[-1] == 20.0
    for (fits, _), (step_s, overflow) in itertools.product(ORDER[:2], ORDER[3:7]):
        assert log_ratio(fits, reference_s) > infeasible_reward(overflow) == -score(step_s, overflow, reference_s)
    assert log_ratio(reference_s / 2, reference_s) == pytest.approx(math.log(2.0))


REACHED = {
    **{name: set(toys.TOYS) for name in ("annealing", "local_search", "best")},
    "compiler": set(toys.TOYS) - {"fork_join"},
}
"""Toys whose optimum a planner finds."""


def brute_force(problem):
    """Returns the smallest step time over all feasible assignments, or None."""
    plans = np.array(list(itertools.product(range(problem.num_devices), repeat=problem.num_groups)), dtype=np.int32)
    batch = simulate_many(problem, plans[problem.group_allowed[np.arange(problem.num_groups), plans].all(axis=1)])
    times = batch.step_time_s[batch.feasible]
    return float(times.min()) if len(times) else None


@pytest.mark.parametrize(("planner", "toy"), [(planner, toy) for planner in REACHED for toy in sorted(REACHED[planner])])
def test_known_optima_are_reached(planner, toy):
    problem, optimum, _ = toys.TOYS[toy]()
    options = {"calls": 400} if planner in ("annealing", "local_search") else {}
    plan = get_planner(planner)(problem, **options)
    assert plan.predicted.step_time_s == pytest.approx(optimum)
    assert plan.predicted.feasible


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_search_equals_brute_force_on_small_problems(seed):
    shape = ("layered", "branchy", "chain")[seed % 3]
    devices = 2 + (seed % 4 == 3)
    problem = random_problem(
        seed, 8 - 2 * (devices == 3), devices, shape=shape, unlike=seed % 2 == 1, memory_factor=(None, 1.5)[seed % 2],
        null_fraction=0.2 * (seed % 3 == 1), shared_parameters=seed % 2,
    )  # fmt: skip
    optimum = brute_force(problem)
    assert optimum is not None
    assert lower_bounds(problem).step_time_s <= optimum * (1 + 1e-12)
    found = get_planner("annealing")(problem, seed=seed, calls=3000, start_temperature=0.1).predicted.step_time_s
    assert found == pytest.approx(optimum, rel=1e-9)
    for name in (*ONE_SHOT[1:], "best", "local_search"):
        options = {"calls": 200} if name == "local_search" else {}
        assert get_planner(name)(problem, **options).predicted.step_time_s >= optimum * (1 - 1e-12)
