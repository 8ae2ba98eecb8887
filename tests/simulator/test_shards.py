"""Sharded plans: what they are lowered to, against arithmetic, replicas and the reference simulator."""

import dataclasses
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

from rlplace.cost.price import price
from rlplace.errors import InputError
from rlplace.graph.capture import capture
from rlplace.plan import PlacementPlan, make_plan
from rlplace.problem import BACKWARD, FORWARD, UPDATE
from rlplace.problem.check import COLLECTIVE
from rlplace.problem.collectives import collective_s
from rlplace.simulator import expand, simulate
from rlplace.simulator.reference import simulate_reference
from rlplace.simulator.shard_layout import Split, overlap, pieces, volume
from rlplace.zoo import load_model

DEVICES = 4


def mlp(*widths):
    layers = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cut_problem(module, inputs, loss, cluster=f"a100-80g:{DEVICES}", **pricing):
    graph = capture(module, inputs, loss=loss)
    problem = price(graph, cluster, level="op", sharding=True, **pricing)
    # Without fixed times, parts are exact fractions.
    return dataclasses.replace(problem, sharding=dataclasses.replace(problem.sharding, fixed_s=None))


@pytest.fixture(scope="module")
def layers():
    return cut_problem(mlp(64, 64, 256, 64), (torch.randn(32, 64),), lambda out: out.square().mean())


@pytest.fixture(scope="module")
def gpt():
    sizes = "n_layer=2,n_embd=32,n_head=4,vocab_size=96,n_positions=16"
    model = load_model(f"hf:gpt2,{sizes}", batch=8, seq=16)
    return cut_problem(model.module, model.example_inputs, model.loss, groups=20)


def plan_of(problem, shards, **fields):
    return make_plan(problem, np.zeros(problem.num_groups, dtype=np.int32), planner="hand", shards=shards, **fields)


def batch_split(problem, parts=DEVICES):
    """Every op along the dimension that runs along the samples; of the MLP that is its rows."""
    rows = {"m", "d0", "m0"}
    return {
        problem.op_names[op]: {name: parts}
        for op, sizes in problem.sharding.dims.items()
        for name in sizes
        if name in rows and sizes[name] == 32
    }


def named(problem, text):
    return [op for op, name in enumerate(problem.op_names) if text in name]


def test_one_part_each_is_the_plan_without_shards(gpt):
    shards = {
        gpt.op_names[op]: dict.fromkeys(sizes, 1) for op, sizes in gpt.sharding.dims.items() if gpt.op_phase[op] == FORWARD
    }
    plan = plan_of(gpt, shards)
    lowered, plain = expand(gpt, plan)
    assert lowered is gpt and plain.shards is None
    cut, whole = simulate(gpt, plan), simulate(gpt, plan.device_of_group)
    assert cut.step_time_s == whole.step_time_s
    assert (cut.peak_memory_bytes == whole.peak_memory_bytes).all()
    assert (cut.start_s == whole.start_s).all() and (cut.end_s == whole.end_s).all()


def test_parts_take_their_share_of_time_and_fixed_times_stay(layers):
    name = "2/linear_1"
    op = layers.op_names.index(name)
    lowered, _ = expand(layers, plan_of(layers, {name: {"n": 2, "m": 2}}))
    parts = named(lowered, f"{name}@")
    assert [lowered.op_names[p] for p in parts] == [f"{name}@{d}" for d in range(4)]
    np.testing.assert_allclose(lowered.time_s[parts, 0], layers.time_s[op, 0] / 4, rtol=1e-12)
    fixed = np.full_like(layers.time_s, 1e-6)
    slow = dataclasses.replace(layers, sharding=dataclasses.replace(layers.sharding, fixed_s=fixed))
    lowered, _ = expand(slow, plan_of(slow, {name: {"n": 2, "m": 2}}))
    np.testing.assert_allclose(lowered.time_s[parts, 0], 1e-6 + (layers.time_s[op, 0] - 1e-6) / 4, rtol=1e-12)


def test_column_then_row_split_needs_one_all_reduce_each_way(layers):
    """Megatron's MLP: columns of the first product, rows of the second; one sum forward, one backward."""
    shards = {"2/linear_1": {"n": 4}, "3/relu_1": {"d1": 4}, "4/linear_2": {"k": 4}}
    lowered, _ = expand(layers, plan_of(layers, shards))
    assert len(lowered.collectives) == 2
    phases = sorted(int(lowered.op_phase[c.ops[0]]) for c in lowered.collectives)
    assert phases == [FORWARD, BACKWARD]
    bytes_of = {FORWARD: 32 * 64 * 4, BACKWARD: 32 * 64 * 4}  # output of the second, input gradient of the first
    for collective in lowered.collectives:
        op = collective.ops[0]
        expected = collective_s(layers.links, "all_reduce", range(4), bytes_of[int(lowered.op_phase[op])])
        assert lowered.time_s[op, 0] == pytest.approx(expected)
    # Weights lie in quarters; the second bias is on all four, and computed there from the same gradient.
    updates = {name: len(named(lowered, f"{name}/update")) for name in ("2.weight", "2.bias", "4.weight", "4.bias", "0.weight")}
    assert updates == {"2.weight": 4, "2.bias": 4, "4.weight": 4, "4.bias": 4, "0.weight": 1}
    kept = [g for g, name in enumerate(lowered.group_names) if name.startswith("2")]
    assert [int(lowered.weight_bytes[g]) for g in kept] == [(64 * 256 + 256) * 4 // 4] * 4
    line = simulate(layers, plan_of(layers, shards))
    moved = sorted(lowered.tensor_bytes[line.transfer_tensor].tolist())
    assert [size for size in moved if size] == [32 * 64 * 4] * 6  # what the cut layers read, and the gradient that they get


def test_batch_split_equals_replicas_of_the_same_share(layers):
    """Tolerance 1e-6: the same ops, bytes and gradient buckets."""
    line = simulate(layers, plan_of(layers, batch_split(layers)))
    share = dataclasses.replace(
        layers,
        sharding=None,
        op_dims={},
        samples_per_microbatch=8,
        time_s=np.where((layers.op_phase == UPDATE)[:, None], layers.time_s, layers.time_s / 4),
        tensor_bytes=layers.tensor_bytes // 4,
        temporary_bytes=layers.temporary_bytes // 4,
    )
    replicas = make_plan(share, np.zeros(share.num_groups, dtype=int), planner="hand", replicas=[[d] for d in range(4)])
    other = simulate(share, replicas)
    assert line.step_time_s == pytest.approx(other.step_time_s, rel=1e-6)
    # The replicas hold the whole input each, which is counted as a weight.
    np.testing.assert_allclose(line.peak_memory_bytes, other.peak_memory_bytes - 24 * 64 * 4, rtol=1e-6)
    assert line.busy_s == pytest.approx(other.busy_s, rel=1e-6)


def test_memory_adds_up(layers):
    whole = layers.resident_bytes.sum()
    by_columns = {f"{i}/{name}": {"n": 4} for i, name in ((0, "linear"), (2, "linear_1"), (4, "linear_2"))}
    lowered, _ = expand(layers, plan_of(layers, by_columns))
    inputs = 32 * 64 * 4
    assert lowered.resident_bytes.sum() == whole + 3 * inputs  # only the model's input is needed by every part
    lowered, _ = expand(layers, plan_of(layers, batch_split(layers)))
    assert lowered.resident_bytes.sum() == 4 * (whole - inputs) + inputs
    for field in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
        parts = getattr(lowered, field).reshape(-1)
        assert parts.sum() == 4 * (getattr(layers, field).sum() - (inputs if field == "weight_bytes" else 0)) + (
            inputs if field == "weight_bytes" else 0
        )


def test_gradient_buckets_are_those_of_the_devices_that_share_weights(layers):
    shards = batch_split(layers) | {"2/linear_1": {"m": 2, "n": 2}}
    lowered, _ = expand(layers, plan_of(layers, shards))
    sums = [c for c in lowered.collectives if lowered.op_phase[c.ops[0]] == UPDATE]
    names = sorted(lowered.op_names[c.ops[0]].rpartition("@")[0] for c in sums)
    assert names == ["all_reduce.0-1-2-3.0", "all_reduce.0-2.1", "all_reduce.1-3.1"]
    half = collective_s(layers.links, "all_reduce", [0, 2], (64 * 256 + 256) * 4 / 2)
    assert lowered.time_s[named(lowered, "all_reduce.0-2.1@0")[0], 0] == pytest.approx(half)


def random_shards(problem, rng, most=DEVICES):
    shards = {}
    for op in np.flatnonzero(problem.op_phase == FORWARD).tolist():
        sizes = problem.sharding.dims.get(op, {})
        left, parts = most, {}
        for name in rng.permutation(list(sizes)).tolist() if rng.random() < 0.8 else []:
            choices = [p for p in range(1, left + 1) if sizes[name] % p == 0]
            parts[name] = int(rng.choice(choices))
            left //= parts[name]
        if parts:
            shards[problem.op_names[op]] = parts
    return shards


@pytest.mark.parametrize("seed", range(8))
def test_random_shards_conserve_work_and_agree_with_the_reference(gpt, seed):
    rng = np.random.default_rng(seed)
    plan = plan_of(gpt, random_shards(gpt, rng))
    lowered, plain = expand(gpt, plan)
    fast, slow = simulate(gpt, plan), simulate_reference(lowered, plain.device_of_group)
    assert fast.step_time_s == slow.step_time_s
    assert (fast.peak_memory_bytes == slow.peak_memory_bytes).all()
    assert (fast.start_s == slow.start_s).all() and (fast.end_s == slow.end_s).all()
    kind = np.array(lowered.op_kind)
    forward = (lowered.op_phase == FORWARD) & (kind != COLLECTIVE)
    assert lowered.time_s[forward, 0].sum() == pytest.approx(gpt.time_s[gpt.op_phase == FORWARD, 0].sum(), rel=1e-9)
    weights = gpt.resident_bytes.sum()
    assert weights <= lowered.resident_bytes.sum() + DEVICES * 8 * len(gpt.sharding.held)
    assert lowered.resident_bytes.sum() <= DEVICES * weights


@pytest.mark.parametrize("seed", range(30))
def test_every_reader_gets_what_it_needs_and_no_more(seed):
    rng = np.random.default_rng(seed)
    axes = tuple(rng.choice([4, 8, 12], int(rng.integers(1, 4))).tolist())
    names = tuple("abc"[: len(axes)])

    def split():
        parts = [(name, int(rng.choice([1, 2, 4]))) for name in names]
        cut = tuple((name, p) for name, p in (rng.permutation(np.array(parts, dtype=object)).tolist()) if p > 1)
        return Split(cut, int(rng.integers(0, 3)))

    hidden = tuple(name if rng.random() < 0.7 else "" for name in names)
    present, needed = split().boxes(hidden, axes), [split().boxes(names, axes) for _ in range(2)]
    got = {(reader, device): 0 for reader, boxes in enumerate(needed) for device in boxes}
    moved = 0
    for piece in pieces(axes, present, needed, lambda source, target: abs(source - target)):
        assert piece.volume <= volume(present[piece.holder])
        for reader, device in piece.readers:
            got[reader, device] += piece.volume
        moved += piece.volume * len({device for _, device in piece.readers if device != piece.holder})
    assert got == {(reader, device): volume(boxes[device]) for reader, boxes in enumerate(needed) for device in boxes}
    if needed[0] == needed[1]:  # a device takes what it lacks once: what it needs minus what it has
        lacking = [volume(b) - (overlap(b, present[d]) if d in present else 0) for d, b in needed[0].items()]
        assert moved == sum(lacking)


def test_moving_rows_to_columns_sends_what_is_missing():
    rows, columns = Split((("m", 4),), 0), Split((("n", 4),), 0)
    found = pieces((8, 12), rows.boxes(("m", "n"), (8, 12)), [columns.boxes(("m", "n"), (8, 12))], lambda s, t: 1.0)
    assert sum(p.volume for p in found if p.readers[0][1] != p.holder) == 8 * 12 * 3 // 4
    assert {p.volume for p in found} == {8 * 12 // 16}


def test_parts_are_ordered_so_that_inputs_stay_in_place(layers):
    """Alternating splits, the published strategy for fully connected layers: nothing but sums travels between them."""
    shards = {"0/linear": {"n": 2, "k": 2}, "1/relu": {"d1": 2}, "2/linear_1": {"k": 2, "n": 2}}
    lowered, _ = expand(layers, plan_of(layers, shards))
    line = simulate(layers, plan_of(layers, shards))
    first = [t for t in line.transfer_tensor.tolist() if "0/linear" in lowered.op_names[lowered.tensor_producer[t]]]
    assert not [t for t in first if lowered.op_phase[lowered.tensor_producer[t]] == FORWARD]


def test_tied_weights_read_in_two_layouts(gpt):
    """The head is cut over the vocabulary, the embedding is not: pieces of the table travel, and of its gradient back."""
    head = next(name for name in gpt.op_names if name.endswith("lm_head/linear"))
    lowered, _ = expand(gpt, plan_of(gpt, {head: {"n": 4}}))
    table = 96 * 32 * 4
    owned = [t for t in range(lowered.num_tensors) if lowered.tensor_owner[t] >= 0 and lowered.tensor_bytes[t] == table // 4]
    assert len(owned) == 3
    back = [t for t in range(lowered.num_tensors) if lowered.tensor_producer[t] >= 0 and lowered.tensor_bytes[t] == table // 4
            and any("wte.weight/update" in lowered.op_names[o]
                    for o in lowered.consumers[lowered.consumer_ptr[t] : lowered.consumer_ptr[t + 1]])]  # fmt: skip
    assert len(back) == 3


def test_groups_elsewhere_start_the_parts_there(layers):
    devices = np.full(layers.num_groups, 2, dtype=np.int32)
    plan = make_plan(layers, devices, planner="hand", shards={"2/linear_1": {"n": 2}})
    lowered, plain = expand(layers, plan)
    parts = named(lowered, "2/linear_1@")
    assert plain.device_of_group[lowered.op_group[parts]].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ({"nothing": {"n": 2}}, "nothing"),
        ({"2/linear_1": {"x": 2}}, "there is no dimension x; its dimensions are m, k, n|there is no dimension"),
        ({"2/linear_1": {"n": 3}}, "3 parts do not divide 'n' of size 256"),
        ({"2/linear_1": {"n": 8}}, "make 8 parts, but there are 4 devices"),
        ({"2/linear_1": {"n": 0}}, "whole number from 1 up"),
        ({"2/linear_1.backward": {"n": 2}}, "cut like its forward op"),
        ({"2.weight/update": {"n": 2}}, "it cannot be cut"),
    ],
)
def test_impossible_shards_are_refused(layers, shards, message):
    with pytest.raises(InputError, match=message):
        plan_of(layers, shards)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": 2}, "several micro-batches"),
        ({"replicas": [[0], [1]]}, "replicas"),
        ({"recompute": [[0]]}, "recompute"),
        ({"schedule": "1f1b"}, "schedule '1f1b'"),
    ],
)
def test_what_excludes_shards_is_refused(layers, fields, message):
    with pytest.raises(InputError, match=f"shards and {message} exclude each other"):
        simulate(layers, plan_of(layers, {"2/linear_1": {"n": 2}}, **fields))


def test_a_problem_that_does_not_say_how_to_cut_is_refused(layers):
    plain = dataclasses.replace(layers, sharding=None, op_dims={})
    with pytest.raises(InputError, match="sharding=True"):
        plan_of(plain, {"2/linear_1": {"n": 2}})
    fixed = dataclasses.replace(layers, group_device=np.zeros(layers.num_groups, dtype=np.int32))
    with pytest.raises(InputError, match="may only sit on one device"):
        plan_of(fixed, {"2/linear_1": {"n": 2}})


def test_no_link_makes_the_plan_infeasible(layers):
    links = dataclasses.replace(layers.links, bandwidth_bytes_per_s=np.zeros((4, 4)), fabrics=())
    apart = dataclasses.replace(layers, links=links)
    line = simulate(apart, plan_of(apart, batch_split(apart)))
    assert not line.feasible and line.step_time_s is None


def test_sharded_plans_survive_their_file(layers, tmp_path):
    plan = plan_of(layers, {"2/linear_1": {"n": 2, "m": 2}})
    plan.save(tmp_path / "p.plan.json")
    layers.save(tmp_path / "x.problem.json")
    again = PlacementPlan.load(tmp_path / "p.plan.json", type(layers).load(tmp_path / "x.problem.json"))
    assert again.shards == plan.shards
    assert simulate(layers, again).step_time_s == simulate(layers, plan).step_time_s


def test_volumes():
    assert volume(((0, 2), (3, 6))) == 6
    assert overlap(((0, 2), (3, 6)), ((1, 4), (0, 4))) == 1
    assert prod(len(split.devices) for split in (Split((("a", 2), ("b", 3)), 1),)) == 6
