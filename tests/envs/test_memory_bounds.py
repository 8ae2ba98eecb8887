"""The proven lower bounds of live memory: by hand, and never above what a simulated plan takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.envs.memory import group_footprint_bytes, group_pinned_bytes, group_saved_bytes
from rlplace.problem import BACKWARD, FORWARD
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def three_layers():
    """Forward ops 0, 1, 2 in groups 0, 1, 2, backward ops 3, 4, 5 in groups 2, 1, 0; each layer keeps 10, 20, 40 bytes."""
    return build_problem(
        "layers", time_s=[[1.0]] * 6, memory_bytes=[None], group=[0, 1, 2, 2, 1, 0], resident_bytes=[1, 2, 3],
        phase=[FORWARD] * 3 + [BACKWARD] * 3, temporary_bytes=[0, 500, 0, 0, 0, 0],
        tensors=[TensorSpec(0, 10, [1, 5]), TensorSpec(1, 20, [2, 4]), TensorSpec(2, 40, [3]), TensorSpec(3, 7, [4]),
                 TensorSpec(4, 8, [5])],
    )  # fmt: skip


def test_what_is_kept_for_the_backward_is_live_at_once():
    problem = three_layers()
    assert group_saved_bytes(problem).tolist() == [10.0, 20.0, 40.0]
    assert group_pinned_bytes(problem).tolist() == [11.0, 22.0, 43.0]


def test_an_op_needs_its_inputs_outputs_and_temporaries():
    assert group_footprint_bytes(three_layers()).tolist() == [10.0 + 8.0, 10.0 + 20.0 + 500.0, 20.0 + 40.0]


def test_tensors_between_groups_are_nobodys():
    problem = build_problem(
        "apart",
        time_s=[[1.0]] * 2,
        memory_bytes=[None],
        group=[0, 1],
        phase=[FORWARD, BACKWARD],
        tensors=[TensorSpec(0, 9, [1])],
    )
    assert group_saved_bytes(problem).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_pivots_of_each_phase_count(phase):
    """What spans an op in the middle; the other phase has no ops here."""
    problem = build_problem(
        "spans", time_s=[[1.0]] * 3, memory_bytes=[None], group=[0, 0, 0], phase=[phase] * 3,
        tensors=[TensorSpec(0, 30, [2]), TensorSpec(0, 1, [1]), TensorSpec(1, 1, [2])],
    )  # fmt: skip
    assert group_saved_bytes(problem).tolist() == [32.0]


def test_what_is_read_before_another_is_made_is_not_live_with_it():
    problem = build_problem(
        "turns", time_s=[[1.0]] * 4, memory_bytes=[None], group=[0] * 4, phase=[FORWARD] * 4,
        tensors=[TensorSpec(0, 30, [1]), TensorSpec(1, 1, [2]), TensorSpec(2, 30, [3])],
    )  # fmt: skip
    assert group_saved_bytes(problem).tolist() == [31.0]
    assert simulate(problem, [0]).peak_memory_bytes.tolist() == [31]


def test_the_pivot_with_the_largest_total_counts():
    """Two branches of forward and backward that do not wait for each other: each is its own pivot."""
    problem = build_problem(
        "branches", time_s=[[1.0]] * 4, memory_bytes=[None], group=[0, 1, 0, 1], phase=[FORWARD, FORWARD, BACKWARD, BACKWARD],
        tensors=[TensorSpec(0, 5, [2]), TensorSpec(1, 50, [3])],
    )  # fmt: skip
    assert group_saved_bytes(problem).tolist() == [0.0, 50.0]


@pytest.mark.parametrize("microbatches", [1, 3])
@given(seed=st.integers(0, 10**6))
def test_no_plan_takes_less(seed, microbatches):
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, int(rng.integers(2, 12)), 3)
    devices = rng.integers(0, 3, problem.num_groups)
    line = simulate(problem, devices, microbatches=microbatches)
    saved, footprint = group_saved_bytes(problem), group_footprint_bytes(problem)
    for device, item in enumerate(problem.devices):
        mine = devices == device
        if mine.any() and line.step_time_s is not None:
            live = max(saved[mine].sum(), footprint[mine].max())
            assert line.peak_memory_bytes[device] >= item.reserved_bytes + problem.resident_bytes[mine].sum() + live
