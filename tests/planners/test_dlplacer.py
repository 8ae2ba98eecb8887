"""dlplacer: what coarsening keeps, gains on branchy graphs, and plans that are never worse than the floor."""

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.planners import get_planner
from rlplace.planners.dlplacer.coarsen import coarsen
from rlplace.planners.dlplacer.contract import contract_groups
from rlplace.problem import FORWARD, problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.problem.order import topological_order
from rlplace.simulator import simulate

pytest.importorskip("ortools")

BRANCHES = ((2.0,), (0.7, 2.0), (0.7, 1.5, 1.5), (0.3, 0.8))
"""Times of the ops of an Inception block's branches, relative to each other as the FLOPs of its convolutions."""


def inception_like(devices, blocks=3, stem=6.0):
    """A stem and blocks of four branches; a block's input takes 2.5 to another device, other tensors 1."""
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


def test_small_problems_are_left_alone():
    problem = random_problem(0, 12, 2)
    coarse, part = contract_groups(problem, coarsen(problem, 12))
    assert coarse is problem and part.tolist() == list(range(problem.num_ops))


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


def test_bad_options():
    with pytest.raises(InputError, match="groups"):
        get_planner("dlplacer")(random_problem(0, 4, 2), groups=0)
