"""Recomputation of activations: exact in time, in memory by theory, held back until the gradient arrives."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.papers.synthetic import random_graph, transformer_graph
from rlplace.cluster import Cluster
from rlplace.cost import price
from rlplace.errors import InputError
from rlplace.plan.recompute import recompute
from rlplace.plan.segments import layer_segments
from rlplace.problem import BACKWARD, FORWARD, UPDATE, Device, Links, Problem
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator.reference import simulate_reference

ONE, FOUR = Cluster.preset("a100-80g:1"), Cluster.preset("a100-80g:2+t4:2")


def chain(length, inside, *, devices=1, bandwidth=1e9, latency=0.0, gradient=1):
    """`length` equal layers between an input and a loss: each keeps `inside` bytes of its own and reads 1 byte.

    Op 0 makes the first input; layer i is group i with forward op i and backward op; the loss is a group of its own.
    """
    names, groups, phases, times, tensors = [], [], [], [], []

    def op(name, group, phase, time_s):
        names.append(name)
        groups.append(group)
        phases.append(phase)
        times.append([time_s] * devices)
        return len(names) - 1

    source = op("input/forward", 0, FORWARD, 0.5)
    forward = [op(f"layer.{i}/forward", i, FORWARD, 1.0) for i in range(1, length + 1)]
    loss = op("loss/forward", length + 1, FORWARD, 0.25)
    loss_backward = op("loss/backward", length + 1, BACKWARD, 0.25)
    backward = {i: op(f"layer.{i}/backward", i, BACKWARD, 2.0) for i in range(length, 0, -1)}
    for i, (maker, reader) in enumerate(zip([source, *forward], [*forward, loss], strict=True)):
        tensors.append((maker, 1, [reader] + ([backward[i + 1]] if i < length else [])))
    tensors += [(maker, inside, [backward[i]]) for i, maker in enumerate(forward, start=1) if inside]
    tensors.append((loss, 0, [loss_backward]))
    makers = [loss_backward, *(backward[i] for i in range(length, 1, -1))]
    tensors += [(maker, gradient, [backward[i]]) for maker, i in zip(makers, range(length, 0, -1), strict=True)]
    none = np.zeros(length + 2, dtype=np.int64)
    return Problem(
        name="chain",
        samples_per_microbatch=1,
        devices=tuple(Device(f"gpu{d}") for d in range(devices)),
        links=Links(np.full((devices, devices), bandwidth), np.full((devices, devices), latency)),
        group_names=("input", *(f"layer.{i}" for i in range(1, length + 1)), "loss"),
        resident_bytes=none,
        weight_bytes=none - 1,
        gradient_bytes=none - 1,
        optimizer_bytes=none - 1,
        group_device=np.full(length + 2, -1, dtype=np.int32),
        op_names=tuple(names),
        op_group=np.array(groups, dtype=np.int32),
        op_phase=np.array(phases, dtype=np.int8),
        time_s=np.array(times),
        temporary_bytes=np.zeros(len(names), dtype=np.int64),
        tensor_producer=np.array([t[0] for t in tensors], dtype=np.int32),
        tensor_owner=np.full(len(tensors), -1, dtype=np.int32),
        tensor_bytes=np.array([t[1] for t in tensors], dtype=np.int64),
        consumer_ptr=np.concatenate([[0], np.cumsum([len(t[2]) for t in tensors])]).astype(np.int64),
        consumers=np.array([c for t in tensors for c in t[2]], dtype=np.int32),
    )


def blocks(length, size):
    return [range(i, min(i + size, length + 1)) for i in range(1, length + 1, size)]


def on_one(problem):
    return simulate_reference(problem, [0] * problem.num_groups)


@pytest.mark.parametrize("inside", [1, 3, 8])
def test_peak_of_a_chain_follows_theory(inside):
    length = 36
    whole = chain(length, inside)
    # Everything is kept: per layer what it reads and what it keeps; at the loss the last output, then two gradients instead.
    assert on_one(whole).peak_memory_bytes[0] == length * (1 + inside) + 2
    peaks = {}
    for size in (1, 2, 3, 4, 6, 9, 12, 18, 36):
        line = on_one(recompute(whole, blocks(length, size)))
        peaks[size] = line.peak_memory_bytes[0]
        # What enters each segment; one segment in full, inner inputs included; the gradients before and after a layer.
        assert peaks[size] == length // size + size * inside + (size - 1) + 2
        assert line.step_time_s == on_one(whole).step_time_s + length * 1.0
    best = min(peaks, key=peaks.get)
    assert abs(math.log(best / math.sqrt(length / (inside + 1)))) <= math.log(1.5)
    assert peaks[best] <= 2 * math.sqrt(length * (inside + 1)) + 3


def test_only_what_is_needed_runs_again():
    whole = chain(4, 0)
    again = recompute(whole, blocks(4, 2))
    # The second layer of a segment keeps nothing but its input; its output is what enters the next segment.
    starts = {"layer.2.recompute", "layer.4.recompute"}
    assert set(again.op_names[whole.num_ops :]) == {"layer.1/forward.recompute", "layer.3/forward.recompute"} | starts
    assert on_one(again).step_time_s == on_one(whole).step_time_s + 2


def test_clones_wait_for_the_gradient_to_arrive():
    """Two devices, a slow link: the clones of the first half start when its gradient is there, not when it is on its way."""
    whole = chain(4, 5, devices=2, bandwidth=10.0, latency=1.0, gradient=20)
    again = recompute(whole, [[1, 2], [3, 4]])
    device = [0, 0, 0, 1, 1, 1]
    line = simulate_reference(again, device)
    names = list(again.op_names)
    arrival = line.end_s[names.index("layer.3/backward")] + 1.0 + 20 / 10.0
    assert line.start_s[names.index("layer.1/forward.recompute")] == arrival
    assert line.start_s[names.index("layer.2/backward")] == arrival + 2
    assert line.start_s[names.index("layer.3/forward.recompute")] == line.end_s[names.index("loss/backward")]
    # One group a segment needs no op of its own to wait.
    single = recompute(whole, [[1], [2]])
    assert sorted(single.op_names[whole.num_ops :]) == ["layer.1/forward.recompute", "layer.2/forward.recompute"]
    line = simulate_reference(single, device)
    names = list(single.op_names)
    assert line.start_s[names.index("layer.2/forward.recompute")] == line.end_s[names.index("layer.3/backward")] + 3.0
    assert line.start_s[names.index("layer.1/forward.recompute")] == line.end_s[names.index("layer.2/backward")]


def test_a_segment_on_two_devices_sends_its_activations_again():
    whole = chain(4, 5, devices=2, bandwidth=10.0, latency=1.0)
    device = [0, 0, 0, 1, 1, 1]
    again = recompute(whole, [[1, 2, 3, 4]])
    line = simulate_reference(again, device)
    names = list(again.op_names)
    # The gradient arrives in layer 4 on the second device; layer 1 starts over a latency later.
    assert line.start_s[names.index("layer.1/forward.recompute")] == line.end_s[names.index("loss/backward")] + 1.0
    assert line.start_s[names.index("layer.3/forward.recompute")] == pytest.approx(
        line.end_s[names.index("layer.2/forward.recompute")] + 1.0 + 1 / 10.0
    )
    assert len(again.op_names) == whole.num_ops + 5


def test_a_segment_with_the_loss_waits_for_its_own_forward():
    whole = chain(3, 5)
    again = recompute(whole, [[2, 3, 4]])
    line = on_one(again)
    names = list(again.op_names)
    assert line.start_s[names.index("layer.2/forward.recompute")] >= line.end_s[names.index("layer.3/forward")]
    assert line.step_time_s == on_one(whole).step_time_s + again.time_s[whole.num_ops :, 0].sum()


def segments_of(seed, groups):
    rng = np.random.default_rng(seed)
    label = rng.integers(-1, max(1, groups // 3), groups)
    if seed % 2:
        label = np.sort(label)  # contiguous
    return [np.flatnonzero(label == s).tolist() for s in sorted(set(label.tolist()) - {-1})] or [[0]]


def check_exact(problem, seed):
    again = recompute(problem, segments_of(seed, problem.num_groups))
    names, first = list(problem.op_names), problem.num_ops
    assert again.op_names[:first] == problem.op_names
    clones = [(i, name.removesuffix(".recompute")) for i, name in enumerate(again.op_names) if i >= first]
    grown = 0.0
    for clone, name in clones:
        assert again.op_phase[clone] == BACKWARD
        if name in names:
            op = names.index(name)
            assert again.op_group[clone] == problem.op_group[op] and problem.op_phase[op] == FORWARD
            np.testing.assert_array_equal(again.time_s[clone], problem.time_s[op])
            grown += problem.time_s[op, 0]
        else:
            assert np.nanmax(again.time_s[clone]) == 0
    before, after = on_one(problem), on_one(again)
    if before.step_time_s is not None:
        assert after.step_time_s == pytest.approx(before.step_time_s + grown, rel=1e-9)
    device = np.random.default_rng(seed).integers(0, problem.num_devices, problem.num_groups)
    if simulate_reference(problem, device).step_time_s is not None:
        assert simulate_reference(again, device).step_time_s is not None
    return again, before, after


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 24), st.sampled_from(["layered", "branchy", "chain"]))
def test_random_problems_grow_by_exactly_what_runs_again(seed, groups, shape):
    problem = random_problem(seed, groups, 3, shape=shape, shared_parameters=seed % 3, null_fraction=0.1 * (seed % 2))
    check_exact(problem, seed)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["task", "op"]))
def test_random_graphs_grow_by_exactly_what_runs_again(seed, size, tied, in_place, weights, level):
    graph = random_graph(seed, size, tied=tied, in_place=in_place)
    assume((graph.op_phase == BACKWARD).any())
    check_exact(price(graph, FOUR, groups=12, level=level, weight_gradients=weights), seed)


@pytest.mark.parametrize("level", ["task", "op"])
def test_transformer_layers(level, tmp_path):
    graph = transformer_graph(9)
    problem = price(graph, ONE, groups=70, level=level)
    segments = layer_segments(problem)
    assert len(segments) == 9
    again = recompute(problem, segments)
    before, after = on_one(problem), on_one(again)
    clones = slice(problem.num_ops, None)
    assert after.step_time_s == pytest.approx(before.step_time_s + again.time_s[clones, 0].sum(), rel=1e-9)
    kept = before.peak_memory_bytes[0] - problem.resident_bytes.sum() - ONE.devices[0].reserved_bytes
    saved = before.peak_memory_bytes[0] - after.peak_memory_bytes[0]
    assert saved > 0.4 * kept
    assert again.source["recompute"] == segments
    again.save(tmp_path / "r.problem.json")
    assert Problem.load(tmp_path / "r.problem.json").fingerprint == again.fingerprint


def test_wrong_segments():
    problem = chain(3, 1)
    with pytest.raises(InputError, match=r"segments\[1\] is empty"):
        recompute(problem, [[1], []])
    with pytest.raises(InputError, match=r"group 2 \(layer.2\) is in segments 0 and 1"):
        recompute(problem, [[1, 2], [2]])
    with pytest.raises(InputError, match=r"a group must be a whole number from 0 to 4, found 5"):
        recompute(problem, [[5]])
    with pytest.raises(InputError, match=r"a group must be .* found True"):
        recompute(problem, [[True]])
    with pytest.raises(InputError, match="no backward"):
        recompute(random_problem(0, 4, training=False), [[0]])
    once = recompute(problem, [[1, 2]])
    with pytest.raises(InputError, match="all segments at once"):
        recompute(once, [[1, 2]])
    assert recompute(problem, []).num_ops == problem.num_ops


def test_gradients_that_only_an_update_reads_hold_nothing_back():
    """Group 1 updates a weight that group 2 also uses; the slow gradient from there does not enter group 1's backward."""
    phases = [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD, BACKWARD, UPDATE]
    problem = build_problem(
        "tied",
        time_s=[[1.0] * 2, [1.0] * 2, [1.0] * 2, [1.0] * 2, [100.0] * 2, [1.0] * 2, [1.0] * 2, [1.0] * 2],
        tensors=[
            TensorSpec(0, 8, [1, 2, 6]),  # group 0 feeds groups 1 and 2
            TensorSpec(1, 8, [3, 5]),  # group 1 keeps this for its backward, op 5; group 3 is the loss, op 3
            TensorSpec(2, 8, [4]),
            TensorSpec(3, 8, [5]),
            TensorSpec(4, 8, [7]),
            TensorSpec(5, 8, [6, 7]),
        ],
        memory_bytes=[None, None],
        group=[0, 1, 2, 3, 2, 1, 0, 1],
        phase=phases,
    )
    again = recompute(problem, [[1]])
    line = simulate_reference(again, [0, 0, 1, 0])
    assert again.op_names[8:] == ("op1.recompute",)
    assert line.start_s[8] == line.end_s[3] < 100


def test_layer_segments_follow_numbered_modules():
    problem = price(transformer_graph(4), ONE, groups=40)
    one = layer_segments(problem)
    assert len(one) == 4
    for number, segment in enumerate(one):
        paths = {path for group in segment for path in problem.group_modules[group]}
        assert any(f".{number}" in path for path in paths)
    assert [sorted(a + b) for a, b in zip(one[::2], one[1::2], strict=True)] == layer_segments(problem, layers=2)
    assert layer_segments(problem, layers=None) == layer_segments(problem, layers=2)
    by_name = layer_segments(chain(5, 1), layers=3)  # nothing but names to go by
    assert by_name == [[1, 2, 3], [4, 5]]
    with pytest.raises(InputError, match="no group lies in"):
        layer_segments(problem, depth=3)
    with pytest.raises(InputError, match="layers must be"):
        layer_segments(problem, layers=0)
