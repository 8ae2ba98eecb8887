"""ParDNN on graphs like the paper's: never worse than its rivals, speed-ups by parallelism, batches that grow with devices."""

import numpy as np
import pytest

from benchmarks.papers.pardnn.baselines import critical_path_first, linear_clustering, measures
from benchmarks.papers.pardnn.models import MODELS, char_crn, word_rnn, wrn
from benchmarks.papers.pardnn.tape import Chip, Tape
from rlplace.errors import InfeasibleError
from rlplace.planners import get_planner
from rlplace.planners.pardnn.nodegraph import op_graph
from rlplace.problem import UPDATE
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

BRANCHY = [{}, {"hosts": 2}, {"comm_ratio": 3.0}, {"width": 12}]


def step_s(planner, problem):
    return get_planner(planner)(problem).predicted.step_time_s


@pytest.mark.parametrize("setting", BRANCHY, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_critical_path_on_branchy_graphs(setting, seed):
    problem = random_problem(seed, 200, (2, 4, 8)[seed], shape="branchy", **setting)
    ours = step_s("pardnn", problem)
    assert ours <= step_s("critical_path", problem) * (1 + 1e-9)
    graph = op_graph(problem, range(problem.num_devices))
    for baseline in (linear_clustering, critical_path_first):
        assert ours <= 1.05 * simulate(problem, baseline(problem, graph)).step_time_s


@pytest.mark.parametrize("spec", ["zoo:inception,blocks=3,image=64", "zoo:moe_toy"])
@pytest.mark.parametrize("level", ["task", "op"])
def test_never_worse_than_critical_path_on_captured_models(spec, level):
    from rlplace import Cluster, capture, price
    from rlplace.zoo.load import load_model

    model = load_model(spec, batch=8, seq=32)
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    problem = price(graph, Cluster.preset("v100:4"), groups=100, level=level)
    assert step_s("pardnn", problem) <= step_s("critical_path", problem) * (1 + 1e-9)


def small_models(devices):
    return [
        char_crn(8, devices, layers=3, hidden=512, steps=16),
        word_rnn(16, devices, layers=6, hidden=1024, steps=12),
        wrn(1, devices, units=4),
    ]


def test_speed_ups_follow_the_degree_of_parallelism():
    found, parallelism = [], []
    for problem in small_models(8):
        one = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32)).step_time_s
        ours = step_s("pardnn", problem)
        found.append(one / ours)
        parallelism.append(measures(op_graph(problem, range(8))).parallelism)
        assert ours <= step_s("critical_path", problem) * (1 + 1e-9)
    assert parallelism == sorted(parallelism, reverse=True)
    assert found == sorted(found, reverse=True)
    assert found[0] > 2.5 > 2.0 > found[2] >= 1.0


def test_the_largest_batch_grows_faster_than_the_devices():
    chip = Chip(memory_bytes=85_000_000)

    def largest(devices):
        batch = 1
        while True:
            problem = word_rnn(batch, devices, layers=4, hidden=256, steps=8, vocabulary=1000, chip=chip)
            try:
                get_planner("pardnn" if devices > 1 else "single")(problem)
            except InfeasibleError:
                return batch // 2
            batch *= 2

    found = {devices: largest(devices) for devices in (1, 2, 4)}
    assert found[1] >= 1
    assert found[2] > 2 * found[1]
    assert found[4] > 4 * found[1]


def test_a_tape_writes_gradients_sums_and_updates():
    tape = Tape(Chip(launch_s=1.0, flops_per_s=1.0, bandwidth_bytes_per_s=1e30))
    weight = tape.weight(8)
    x = tape.source(4)
    hidden = tape.matmul(x, weight, 4, 10.0)
    again = tape.matmul(hidden, weight, 4, 10.0)
    tape.backward(tape.reduce(again, 4))
    problem = tape.problem("twice", 2, 1)
    # source, two products, loss; its gradient, that of the mean, two kernels for each product, their sum, the update
    assert problem.num_ops == 4 + 2 + 4 + 1 + 1
    assert sorted(problem.time_s[:, 0].tolist()) == [1.0] * 6 + [11.0] * 6
    update = int(np.flatnonzero(problem.op_phase == UPDATE)[0])
    owner = int(problem.op_group[update])
    assert problem.resident_bytes[owner] == 8
    reads = np.flatnonzero(problem.tensor_owner == owner)
    readers = problem.consumers[problem.consumer_ptr[reads[0]] : problem.consumer_ptr[reads[0] + 1]]
    assert len(reads) == 1 and len(readers) == 4


def test_word_rnn_is_near_the_papers_graph():
    model = MODELS["word_rnn"]
    problem = model.build()
    graph = op_graph(problem, [0, 1])
    found = measures(graph)
    assert abs(graph.num_nodes / model.nodes - 1) < 0.02
    assert abs(problem.weight_bytes.sum() / 4 / model.parameters - 1) < 0.02
    assert abs(found.parallelism / model.parallelism - 1) < 0.3
    assert abs(found.communication_ratio / model.communication_ratio - 1) < 0.3
