"""A run that goes on from a saved state after a move equals a whole run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import Simulator
from rlplace.simulator.incremental import IncrementalSimulator

SETTINGS = settings(max_examples=60, derandomize=True)


def walk(problem: Problem, rng: np.random.Generator, steps: int, microbatches: int) -> int:
    """Makes random moves and compares; returns how many runs began at a saved state."""
    priority = rng.integers(0, 3, problem.num_ops).astype(np.float64) if rng.random() < 0.3 else None
    whole = Simulator(problem, microbatches=microbatches, priority=priority)
    ours = IncrementalSimulator(problem, microbatches=microbatches, priority=priority, checkpoints=int(rng.integers(1, 9)))
    plan = rng.integers(0, problem.num_devices, problem.num_groups)
    resumed = 0

    def check(found: tuple[float, float], devices: np.ndarray) -> None:
        step, overflow = whole.evaluate(devices)
        assert found == (step, overflow)
        assert ours.peak_memory_bytes.tolist() == whole.peak_memory_bytes.tolist()
        assert ours.busy_s.tobytes() == whole.busy_s.tobytes()

    for _ in range(rng.integers(1, 3)):
        check(ours.evaluate(plan), plan)
    for _ in range(steps):
        count = rng.integers(1, 3)
        move = [(int(rng.integers(problem.num_groups)), int(rng.integers(problem.num_devices))) for _ in range(count)]
        moved = plan.copy()
        for group, device in move:
            moved[group] = device
        resumed += ours.saved_state(move) >= 0
        check(ours.evaluate_move(move), moved)
        if rng.random() < 0.4:
            check(ours.accept(move), moved)
            plan = moved
    return resumed


@SETTINGS
@given(seed=st.integers(0, 2**32 - 1))
def test_moves_equal_whole_runs_with_ties(training_problem: Callable[[np.random.Generator], Problem], seed: int) -> None:
    rng = np.random.default_rng(seed)
    walk(training_problem(rng), rng, 12, int(rng.integers(1, 4)))


@pytest.mark.parametrize("shape", ["layered", "branchy", "chain"])
@pytest.mark.parametrize("training", [True, False])
def test_moves_equal_whole_runs_on_larger_graphs(shape: str, training: bool) -> None:
    problem = random_problem(3, 60, 4, shape=shape, training=training, hosts=2, memory_factor=1.2, shared_parameters=2)
    assert walk(problem, np.random.default_rng(0), 80, 1) > 15  # saved states are of use here


def test_moves_that_change_a_step_from_its_beginning_start_there() -> None:
    problem = random_problem(0, 30, 3, shape="chain", training=False)
    simulator = IncrementalSimulator(problem)
    simulator.evaluate(np.arange(30) // 10)
    assert simulator.saved_state([(0, 1)]) == -1
    assert simulator.saved_state([(29, 1)]) > 3
    assert simulator.saved_state([(29, 1), (0, 1)]) == -1


def test_bad_moves_are_refused() -> None:
    problem = random_problem(0, 6, 2)
    simulator = IncrementalSimulator(problem)
    with pytest.raises(InputError, match="evaluate a plan before"):
        simulator.evaluate_move([(0, 1)])
    step = simulator.evaluate([0] * 6)
    for move in ([(6, 0)], [(0, 2)], [(0, -1)], [(0, 1), (-1, 0)]):
        with pytest.raises(InputError, match="no group"):
            simulator.evaluate_move(move)
    assert simulator.evaluate_move([]) == step
