"""Bi-partition: optimal cuts of chains, plans of split problems, and layer-wise pipelines."""

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cost.contract import split_backward
from rlplace.errors import InputError
from rlplace.placement import NEEDS_SPLIT
from rlplace.placement.published.bipartition import bipartition, straight_pipelines
from rlplace.placement.published.bipartition.layers import is_split, layer_numbers, layer_orders, make_layers, make_pipeline
from rlplace.placement.published.bipartition.solve import Workers, bi_partition, pass_costs, price_cuts
from rlplace.plan import PlacementPlan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.placement.pipedream import make_chain, profile_chain, profile_problem, read_profile

PROFILES = Path(__file__).parent / "profiles"


@cache
def split_profile(name, devices):
    return split_backward(profile_problem(read_profile(PROFILES / f"{name}.txt"), devices, name=name))


def test_an_unsplit_problem_is_refused():
    assert "bipartition" in NEEDS_SPLIT
    with pytest.raises(InputError, match="split_backward"):
        bipartition(random_problem(0, 8, 2))
    split = split_backward(random_problem(0, 8, 2))
    for gap in (-1, 2.5, None, True):
        with pytest.raises(InputError, match="gap"):
            bipartition(split, gap=gap)


def test_the_plan_refers_to_the_split_problem(tmp_path):
    split = split_profile("alexnet", 4)
    plan = bipartition(split, seed=3)
    assert plan.problem == split.fingerprint and plan.planner == "bipartition" and plan.seed == 3
    report = plan.predicted.bipartition
    assert report["layers"] == 22 and 0 < report["gap"] <= 8 and report["displaced_layers"] > 0
    assert report["layer_wise_bottleneck_s"] / report["bottleneck_s"] == pytest.approx(1.29, abs=0.005)
    plan.save(tmp_path / "p.plan.json")
    assert PlacementPlan.load(tmp_path / "p.plan.json", split).predicted.bipartition == report


def test_layers_of_a_split_chain_are_those_of_the_profile():
    nodes = read_profile(PROFILES / "vgg16.txt")
    chain, split = profile_chain(nodes), split_profile("vgg16", 4)
    layers = make_layers(split, layer_orders(split)[0], [0, 1, 2, 3])
    np.testing.assert_allclose(layers.chain.forward_s[:, 0], chain.forward_s)
    np.testing.assert_allclose(layers.chain.backward_s[:, 2], chain.backward_s)
    np.testing.assert_array_equal(layers.chain.activation_bytes[:-1], chain.activation_bytes[:-1])
    # Two layers read the output of node32, and each sends a gradient back.
    np.testing.assert_array_equal(layers.chain.gradient_bytes[:30], chain.activation_bytes[:30])
    np.testing.assert_array_equal(layers.chain.weight_bytes, chain.weight_bytes)
    cuts = price_cuts((0, 3, 6, 13, 40), (0, 3, 7, 14, 40), pass_costs(chain, make_pipeline(split, [0, 1, 2, 3])))
    devices = layers.assign(split, cuts)
    layer_named = {name: i for i, name in enumerate(chain.names)}
    for group, name in enumerate(split.group_names):
        cut = cuts.backward if name.endswith(".backward") else cuts.forward
        assert cut[devices[group]] <= layer_named[name.removesuffix(".backward")] < cut[devices[group] + 1]


def test_backward_groups_of_any_name_find_their_layer():
    split = split_backward(random_problem(4, 12, 2, shape="chain"))
    assert is_split(split)
    named, follows = layer_numbers(split, layer_orders(split)[0])
    names = tuple(f"g{i}" for i in range(split.num_groups))
    split.__dict__["group_names"] = names  # the same problem, as somebody else would name it
    other, _ = layer_numbers(split, layer_orders(split)[0])
    assert (follows == np.tile([False, True], 12)).all()
    # A backward op reads its own group's output and no later one's.
    np.testing.assert_array_equal(named, other)


def test_long_chains_are_merged_evenly():
    split = split_backward(random_problem(1, 300, 3, shape="chain"))
    layers = make_layers(split, layer_orders(split)[0], [0, 1, 2], max_layers=40)
    assert layers.chain.num_layers <= 40
    fine = make_layers(split, layer_orders(split)[0], [0, 1, 2], max_layers=1000)
    assert fine.chain.num_layers == 300
    merged_s, fine_s = ((chain.forward_s + chain.backward_s).mean(axis=1) for chain in (layers.chain, fine.chain))
    assert merged_s.sum() == pytest.approx(fine_s.sum())
    assert merged_s.max() <= fine_s.sum() / 40 + fine_s.max()
    assert (np.diff(layers.layer_of_group[layer_orders(split)[0][::1]]) >= 0).sum() > 250


def test_memory_limits_hold():
    split = split_backward(random_problem(7, 30, 3, shape="chain", memory_factor=2.0))
    plan = bipartition(split)
    line = simulate(split, plan)
    assert line.feasible and plan.predicted.step_time_s == line.step_time_s


def chain_of(forward, factor=2.0):
    return make_chain(forward, factor * np.array(forward, dtype=float))


@pytest.mark.parametrize(
    ("forward", "workers", "by_gap"),
    [
        ([1, 1, 4, 1, 1], 2, {0: 18, 1: 14, 2: 13, 3: 12, 4: 12, None: 12}),
        ([1, 1, 4, 1, 1], 3, {0: 12, 1: 10, 2: 10, None: 10}),
        ([2, 1, 2, 1, 3], 2, {0: 15, None: 14}),
        ([3, 1, 1, 1], 2, {0: 9, 1: 9, None: 9}),
    ],
)
def test_examples_with_known_optimum(forward, workers, by_gap):
    chain = chain_of(forward)
    for gap, seconds in by_gap.items():
        cuts = bi_partition(chain, workers, gap)
        assert cuts.bottleneck_s == pytest.approx(seconds, abs=1e-12)
        assert gap is None or cuts.gap <= gap


def plain_cost(chain, workers, i, forward, backward):
    """Returns the cost of a worker by the cost model once more, layer by layer."""
    count = chain.num_layers
    ahead, back = set(range(*forward)), set(range(*backward))
    load = sum(chain.forward_s[layer] for layer in ahead) + sum(chain.backward_s[layer] for layer in back)
    sent = sum(chain.stash_bytes[layer] for layer in ahead - back) + sum(chain.weight_bytes[x] for x in back - ahead)
    got = sum(chain.stash_bytes[layer] for layer in back - ahead) + sum(chain.weight_bytes[x] for x in ahead - back)
    if ahead:
        sent += chain.activation_bytes[forward[1] - 1] if forward[1] < count else 0
        got += chain.activation_bytes[forward[0] - 1] if forward[0] else 0
    if back:
        sent += chain.gradient_bytes[backward[0] - 1] if backward[0] else 0
        got += chain.gradient_bytes[backward[1] - 1] if backward[1] < count else 0
    held = sum(chain.resident_bytes[x] for x in back) + sum(chain.weight_bytes[x] for x in ahead - back)
    held += sum(chain.stash_bytes[x] for x in ahead | back)
    if held > workers.memory_bytes[i]:
        return np.inf
    return max(load, max(sent, got) * workers.seconds_per_byte[i])


def brute_force(chain, workers, gap):
    best = np.inf
    inner = list(itertools.combinations_with_replacement(range(chain.num_layers + 1), workers.count - 1))
    for p, q in itertools.product(inner, inner):
        if max((abs(a - b) for a, b in zip(p, q, strict=True)), default=0) <= gap:
            f, b = (0, *p, chain.num_layers), (0, *q, chain.num_layers)
            best = min(best, max(plain_cost(chain, workers, i, f[i : i + 2], b[i : i + 2]) for i in range(workers.count)))
    return best


numbers = st.integers(0, 9)


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_equals_brute_force_with_traffic_and_memory(data):
    layers, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    column = st.lists(numbers, min_size=layers, max_size=layers)
    forward, backward, activation, gradient, stash, weight = (data.draw(column) for _ in range(6))
    chain = make_chain(
        forward, backward, activation_bytes=activation, gradient_bytes=gradient, stash_bytes=stash, weight_bytes=weight,
        resident_bytes=2 * np.array(weight),
    )  # fmt: skip
    per_worker = st.lists(numbers, min_size=count, max_size=count)
    limit = data.draw(st.sampled_from([np.inf, 120, 60]))
    workers = Workers(np.array(data.draw(per_worker)) / 4.0, np.full(count, float(limit)))
    gap = data.draw(st.integers(0, layers))
    optimum = brute_force(chain, workers, gap)
    cuts = bi_partition(chain, workers, gap)
    if cuts is None:
        assert optimum == np.inf
        return
    assert cuts.bottleneck_s == pytest.approx(optimum, rel=1e-12)
    named = price_cuts(cuts.forward, cuts.backward, pass_costs(chain, workers))
    assert named.bottleneck_s == pytest.approx(
        max(plain_cost(chain, workers, i, cuts.forward[i : i + 2], cuts.backward[i : i + 2]) for i in range(count))
    )


def test_wrong_arguments():
    chain = chain_of([1, 2])
    for gap in (-1, 1.5, True):
        with pytest.raises(InputError, match="gap"):
            bi_partition(chain, 2, gap)
    with pytest.raises(InputError, match="workers"):
        bi_partition(chain, 0)
    with pytest.raises(InputError, match="times are for 2 workers"):
        bi_partition(make_chain(np.ones((3, 2)), np.ones((3, 2))), 3)


def test_the_exact_partition_is_among_them():
    """Layers of 9, 1, 1, 1, 9, 1 on three devices: 22 seconds of work, and a 9 must share a device with a 1: 10."""
    times = [9, 1, 1, 1, 9, 1]
    tensors = [TensorSpec(layer, 8, [layer + 1]) for layer in range(5)]
    problem = build_problem("chain", time_s=[[t] * 3 for t in times], tensors=tensors, memory_bytes=[None] * 3)
    plans = [found for found in straight_pipelines(problem) if found is not None]
    assert min(np.bincount(found, weights=times, minlength=3).max() for found in plans) == 10
