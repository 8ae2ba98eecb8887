"""gpipe and pipedream: partitions against brute force, replicated stages, hosts, branches, and published stages."""

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.bipartition.profile import profile_problem, read_profile
from benchmarks.papers.pipedream import Level, device_levels, replicated_optimum, solve_levels
from rlplace.planners import get_planner
from rlplace.planners.bipartition.layers import layer_orders, make_layers
from rlplace.planners.gpipe import block_partition
from rlplace.planners.gpipe import candidates as gpipe_candidates
from rlplace.planners.pipedream.pipedream import candidates
from rlplace.planners.pipedream.stages import branch_states, chain_states
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem

PROFILES = Path(__file__).parent / "profiles"


def states_of(problem):
    layers = make_layers(problem, layer_orders(problem)[0], range(problem.num_devices))
    return branch_states(problem, layers) or chain_states(layers)


def chain_problem(times, sizes, weights, devices, memory=None):
    """Forward and backward ops of a chain; the whole time is the forward op's, so a layer costs times[i]."""
    count = len(times)
    tensors = [TensorSpec(i, int(sizes[i]), [i + 1]) for i in range(count - 1)]
    return build_problem(
        "chain", time_s=[[float(t)] * devices for t in times], tensors=tensors, memory_bytes=[memory] * devices,
        resident_bytes=[int(w) for w in weights],
    )  # fmt: skip


def plain_optimum(times, sizes, weights, levels, stages=None):
    """The recursion of PipeDream once more, top down over intervals."""

    @cache
    def solve(level, i, j, machines):
        if level < 0:
            return float(sum(times[i:j]))
        bandwidth = levels[level].bandwidth_bytes_per_s
        best = np.inf
        for r in range(1, machines + 1):
            for k in range(i, j):
                if k > i and r == machines:
                    continue
                stage = solve(level - 1, k, j, levels[level - 1].machines if level else 1)
                stage = (stage + 4 * (r - 1) * sum(weights[k:j]) / (bandwidth * r)) / r
                if k > i:
                    stage = max(stage, solve(level, i, k, machines - r), sizes[k - 1] / (bandwidth * r))
                best = min(best, stage)
        return best

    return solve(len(levels) - 1, 0, len(times), levels[-1].machines)


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.5, 2.0, 50.0])), min_size=1, max_size=2),
)
def test_replicated_stages_equal_brute_force(layers, levels):
    times, sizes, weights = zip(*layers, strict=True)
    joined = tuple(Level(*level) for level in levels)
    solved = solve_levels(states_of(chain_problem(times, sizes, weights, 1)), joined)
    assert solved is not None
    seconds, stages = solved
    assert seconds == pytest.approx(plain_optimum(times, sizes, weights, joined), rel=1e-12)
    assert [stages[0].begin, stages[-1].end] == [0, len(times)]
    assert all(a.end == b.begin for a, b in itertools.pairwise(stages))
    assert sum(stage.replicas for stage in stages) <= np.prod([level.machines for level in joined])


def test_stages_of_pipedreams_own_vgg16():
    """Its repository runs VGG16 on four machines as node2..node18 on three and the rest on one (1 GB/s links)."""
    problem = profile_problem(read_profile(PROFILES / "vgg16.txt"), 4, bandwidth_bytes_per_s=1e9)
    report = replicated_optimum(problem)
    assert [(s["first"], s["last"], s["replicas"]) for s in report["stages"]] == [
        ("node2", "node18", 3),
        ("node19", "node41", 1),
    ]
    assert report["bottleneck_s"] == pytest.approx(2 * 102760448 / 1e9)  # node18's output, which one device takes in
    assert report["devices_used"] == 4 and report["in_flight"] == 2


def test_memory_leaves_shorter_stages_or_none():
    times, none = [1, 1, 1, 1], [0, 0, 0, 0]
    states = states_of(chain_problem(times, none, [10] * 4, 1))
    level = (Level(4, 1e9),)
    seconds, stages = solve_levels(states, level, 100.0)
    assert seconds == pytest.approx(1.0, rel=1e-6) and sum(stage.replicas for stage in stages) == 4
    # A layer is 10 bytes. One layer for each of four stages, or all in four copies, needs 40 bytes somewhere: a second.
    # One layer in two copies, held for 4 / 2 micro-batches, then three in two copies: 20 and 30 bytes, 1.5 seconds.
    # One layer in two copies, then one and two layers: 20 bytes each, two seconds. The first layer never needs less.
    for limit, expected in ((40.0, 1.0), (39.0, 1.5), (30.0, 1.5), (29.0, 2.0), (20.0, 2.0)):
        assert solve_levels(states, level, limit)[0] == pytest.approx(expected, rel=1e-6)
    assert solve_levels(states, level, 19.0) is None
    # Two machines: stages of 1 and 3 layers hold 2 x 10 and 30 bytes, of 2 and 2 layers 2 x 20 and 20.
    two = (Level(2, 1e9),)
    assert solve_levels(states, two, 30.0)[0] == pytest.approx(3.0)
    assert solve_levels(states, two, 29.0) is None


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


def test_hosts_are_found_in_the_links():
    assert device_levels(random_problem(0, 4, 1)) == (Level(1, float("inf")),)
    assert device_levels(random_problem(0, 4, 4)) == (Level(4, 2e10),)
    assert device_levels(random_problem(0, 4, 6, hosts=2)) == (Level(3, 2e10), Level(2, 2.5e9))
    assert device_levels(random_problem(0, 4, 5, hosts=2)) == (Level(5, 2.5e9),)  # hosts of unlike size are one level


def test_reports_do_not_need_a_feasible_replication():
    problem = random_problem(1, 20, 2, shape="chain", memory_factor=1.05)
    report = replicated_optimum(problem)
    assert set(report) >= {"bottleneck_s", "stages", "levels"}


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
