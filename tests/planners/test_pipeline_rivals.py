"""gpipe and pipedream: partitions against brute force, and branches."""

import itertools

import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.planners import get_planner
from rlplace.planners.bipartition.layers import layer_orders, make_layers
from rlplace.planners.gpipe import block_partition
from rlplace.planners.gpipe import candidates as gpipe_candidates
from rlplace.planners.pipedream.pipedream import candidates
from rlplace.planners.pipedream.stages import branch_states
from rlplace.problem.build import TensorSpec, build_problem


def chain_problem(times, sizes, weights, devices, memory=None):
    """Forward and backward ops of a chain; the whole time is the forward op's, so a layer costs times[i]."""
    count = len(times)
    tensors = [TensorSpec(i, int(sizes[i]), [i + 1]) for i in range(count - 1)]
    return build_problem(
        "chain", time_s=[[float(t)] * devices for t in times], tensors=tensors, memory_bytes=[memory] * devices,
        resident_bytes=[int(w) for w in weights],
    )  # fmt: skip


def straight_brute_force(times, sizes, devices, bandwidth):
    best = np.inf
    for cuts in itertools.combinations_with_replacement(range(len(times) + 1), devices - 1):
        ends = (0, *cuts, len(times))
        cost = max(sum(times[a:b]) for a, b in itertools.pairwise(ends))
        for a, b in itertools.pairwise(ends):
            if 0 < a < b:
                cost = max(cost, sizes[a - 1] / bandwidth)
        best = min(best, cost)
    return best


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(1, 3))
def test_straight_pipelines_are_among_the_candidates(layers, devices):
    times, sizes = zip(*layers, strict=True)
    problem = chain_problem(times, sizes, [0] * len(times), devices)
    found = np.inf
    for assignment in candidates(problem, 0, microbatches=4):
        loads = np.bincount(assignment, weights=times, minlength=devices)
        border = [sizes[i] for i in range(len(times) - 1) if assignment[i] != assignment[i + 1]]
        found = min(found, max(loads.max(), max(border, default=0)))
    assert found == straight_brute_force(times, sizes, devices, 1.0)


def test_branches_may_be_stages_of_their_own():
    """A fork of two chains, 1-(4, 4)-(1, 1)-1: cut through the fork, three devices reach 5; a chain order reaches 5 or 6."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
    tensors = [TensorSpec(a, 0, [b for x, b in edges if x == a]) for a in range(5)]
    times = [1, 4, 4, 1, 1, 1]
    problem = build_problem("fork", time_s=[[t] * 3 for t in times], tensors=tensors, memory_bytes=[None] * 3)
    layers = make_layers(problem, layer_orders(problem)[0], [0, 1, 2])
    states = branch_states(problem, layers)
    # closed sets: none, {0}, then 0..2 of each branch, and all
    assert states.count == 1 + 1 + 8 + 1
    best = min(np.bincount(found, weights=times, minlength=3).max() for found in candidates(problem, 0))
    assert best == 5
    wide = toys.fork_join(12, 2).problem
    assert branch_states(wide, make_layers(wide, layer_orders(wide)[0], [0, 1])) is None  # 2^12 sets are too many


@settings(max_examples=80, derandomize=True)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(1, 6))
def test_block_partition_keeps_its_bound(costs, parts):
    cuts = block_partition(costs, parts)
    assert cuts[0] == 0 and cuts[-1] == len(costs) and len(cuts) == min(parts, len(costs)) + 1
    assert cuts == sorted(cuts)
    spread = max(costs) - min(costs)
    scaled = [(c - min(costs)) / spread if spread else 0.0 for c in costs]
    sums = [sum(scaled[a:b]) for a, b in itertools.pairwise(cuts)]
    assert max(sums) <= min(sums) + 1 + 1e-6


def test_gpipe_reaches_the_textbook_step():
    """Four equal stages, 1 + 2 seconds each, eight micro-batches: (8 + 3) * 3 seconds."""
    problem = toys.pipeline_chain(4, 4)
    plan = get_planner("gpipe")(problem, microbatches=8)
    assert plan.schedule == "gpipe" and plan.microbatches == 8
    assert plan.predicted.step_time_s == pytest.approx(33.0)
    assert sorted(plan.device_of_group) == [0, 1, 2, 3]
    assert get_planner("pipedream")(problem, microbatches=8).predicted.step_time_s == pytest.approx(33.0)


def test_gpipe_finds_the_exact_partition():
    """Layers of 9, 1, 1, 1, 9, 1 on three devices: 22 seconds of work, and a 9 must share a device with a 1: 10."""
    times = [9, 1, 1, 1, 9, 1]
    problem = chain_problem(times, [0] * 6, [0] * 6, 3)
    assert min(np.bincount(found, weights=times, minlength=3).max() for found in gpipe_candidates(problem, 0)) == 10
