"""Loads of devices and channels, bytes that are missing, and changed hardware, by hand."""

import numpy as np
import pytest

from rlplace.cluster.links import Device
from rlplace.explanation.bounds import step_bounds
from rlplace.explanation.changes import with_links, with_speed, without_optimizer
from rlplace.explanation.relax import shortage_of_only_plan
from rlplace.plan import make_plan
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.simulator.simulated_plan import run_plan


def bounds_of(problem, devices):
    return step_bounds(run_plan(problem, make_plan(problem, devices, planner="test")))


def test_what_a_channel_carries_adds_up():
    """6 and 2 bytes from the first device to the second at 2 bytes a second, after a second each; 4 bytes back."""
    problem = build_problem(
        "there and back", time_s=[[1.0, 1.0]] * 4, memory_bytes=[100, 20], bandwidth_bytes_per_s=2.0, latency_s=1.0,
        tensors=[TensorSpec(0, 6, [1]), TensorSpec(1, 4, [2]), TensorSpec(2, 2, [3])],
    )  # fmt: skip
    found = bounds_of(problem, [0, 1, 0, 1])
    assert [(load.name, load.size_bytes, load.transfers, load.busy_s) for load in found.channels] == [
        ("gpu0->gpu1", 8, 2, 6.0), ("gpu1->gpu0", 4, 1, 3.0),
    ]  # fmt: skip
    assert found.step_time_s == 13.0 and [device.busy_s for device in found.devices] == [2.0, 2.0]


def test_the_fullest_device_is_that_with_the_least_left():
    problem = build_problem("pair", time_s=[[1.0, 1.0]] * 2, memory_bytes=[100, 10], tensors=[], resident_bytes=[50, 9])
    found = bounds_of(problem, [0, 1])
    assert found.tightest.name == "gpu1" and found.tightest.used == pytest.approx(0.9)
    assert bounds_of(build_problem("free", time_s=[[1.0]], memory_bytes=[None], tensors=[]), [0]).tightest is None


def test_a_single_device_lacks_what_does_not_fit_beside_its_reserved_bytes():
    """100 bytes, 30 of them reserved, for 90: 20 are short; with 80 and less nothing is."""
    for resident, short in ((90, 20), (71, 1), (70, None)):
        device = Device("gpu0", memory_bytes=100, reserved_bytes=30)
        problem = build_problem(
            "one", time_s=[[1.0]], memory_bytes=[device.memory_bytes], tensors=[], resident_bytes=[resident]
        )
        data = problem_to_dict(problem)
        data["devices"][0]["reserved_bytes"] = device.reserved_bytes
        assert shortage_of_only_plan(problem_from_dict(data)) == short


def test_a_quicker_device_computes_faster_and_moves_no_faster():
    problem = build_problem(
        "collective", time_s=[[6.0, 6.0]] * 4, group=[0, 1, 0, 1], memory_bytes=[None] * 2, bandwidth_bytes_per_s=1.0,
        tensors=[TensorSpec(0, 1, [2]), TensorSpec(1, 1, [3])], collectives=[([2, 3], [0, 1])],
    )  # fmt: skip
    assert with_speed(problem, 1, 2.0).time_s.tolist() == [[6.0, 3.0], [6.0, 3.0], [6.0, 6.0], [6.0, 6.0]]


def test_quicker_links_keep_their_latencies():
    problem = build_problem(
        "table", time_s=[[1.0, 1.0]] * 2, memory_bytes=[None] * 2, bandwidth_bytes_per_s=2.0, latency_s=3.0,
        tensors=[TensorSpec(0, 4, [1])],
    )  # fmt: skip
    data = problem_to_dict(problem)
    data["tensors"][0]["transfer_s"] = [[0.0, 13.0], [2.0, 0.0]]
    quick = with_links(problem_from_dict(data), 2.0)
    ((table,),) = [quick.tensor_transfer_s.values()]
    assert np.asarray(table).tolist() == [[0.0, 8.0], [2.0, 0.0]]  # 3 s and half of 10 s; what is below the latency stays
    assert quick.links.bandwidth_bytes_per_s[0, 1] == 4.0 and quick.links.latency_s[0, 1] == 3.0


def test_less_optimizer_state_is_less_to_hold():
    problem = build_problem("state", time_s=[[1.0]] * 2, memory_bytes=[None], tensors=[], resident_bytes=[100, 50])
    data = problem_to_dict(problem)
    for group, sizes in zip(data["groups"], ((20, 20, 60), (10, 9, 31)), strict=True):
        group.update(zip(("weight_bytes", "gradient_bytes", "optimizer_bytes"), sizes, strict=True))
    less = without_optimizer(problem_from_dict(data), keep=0.5)
    assert less.resident_bytes.tolist() == [70, 35] and less.optimizer_bytes.tolist() == [30, 16]
