"""Meshes, layouts and moves of cut tensors, and what the sharded engine refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import sharded_worker as worker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from rlplace.errors import InputError
from rlplace.runtime.distributed.graph.forward_graph import forward_graph
from rlplace.runtime.distributed.sharded.engine import devices_of, why_not
from rlplace.runtime.distributed.sharded.mesh import factor_mesh, nearest_shards
from rlplace.runtime.distributed.sharded.program import make_program, storable
from rlplace.runtime.distributed.sharded.spec import PARTIAL, WHOLE, Spec, coarsened, moved_elements, moves, normal, whole
from rlplace.runtime.distributed.sharded.views import view

MESH = (2, 2, 3)
DEVICES = list(itertools.product(*map(range, MESH)))
counts = st.integers(1, 6)


@st.composite
def shard_maps(draw):
    ops = draw(st.integers(1, 4))
    return {f"op{i}": {f"d{j}": draw(counts) for j in range(draw(st.integers(1, 3)))} for i in range(ops)}


@settings(max_examples=200)
@given(shards=shard_maps(), world=st.sampled_from([1, 2, 4, 6, 8, 12]))
def test_mesh_has_axes_for_every_op_or_refuses(shards, world):
    fits = all(world % prod(dims.values()) == 0 for dims in shards.values())
    if not fits:
        with pytest.raises(InputError, match="nearest parts that are"):
            factor_mesh(shards, world)
        near = nearest_shards(shards, world)
        assert near != shards
        assert all(shards[op][dim] % parts == 0 for op, dims in near.items() for dim, parts in dims.items())
        shards = near
    found = factor_mesh(shards, world)
    assert prod(found.shape) == world
    for op, dims in shards.items():
        cut = dict(found.cuts.get(op, ()))
        assert {dim: prod(found.shape[axis] for axis in axes) for dim, axes in cut.items()} == {
            d: n for d, n in dims.items() if n > 1
        }
        used = [axis for axes in cut.values() for axis in axes]
        assert len(set(used)) == len(used)


def test_fewest_axes():
    assert factor_mesh({"a": {"m": 4}, "b": {"n": 4}}, 4).shape == (4,)
    assert factor_mesh({"a": {"m": 4}, "b": {"m": 2, "n": 2}}, 4).shape == (2, 2)
    assert factor_mesh({"a": {"m": 2}}, 8).shape == (4, 2)
    assert factor_mesh({}, 1).shape == ()
    assert dict(factor_mesh({"a": {"m": 2}}, 8).cuts) == {"a": (("m", (1,)),)}  # part p on device p


def test_refusal_names_the_nearest():
    with pytest.raises(InputError, match=r"'proj' is cut into 3 n, which are no axes of a mesh of 4 devices.*: 1 n"):
        factor_mesh({"ok": {"m": 2}, "proj": {"n": 3}}, 4)


@st.composite
def layouts(draw, shape=None):
    """A layout on `MESH` of a tensor whose dimensions have many divisors."""
    free = [axis for axis in range(3) if draw(st.booleans())]
    dims = []
    shape = shape or draw(st.lists(st.sampled_from([1, 2, 6, 12, 24]), min_size=1, max_size=3))
    for size in shape:
        factors, left = [], size
        while left > 1:
            axis = draw(st.sampled_from([*free, WHOLE]))
            if axis != WHOLE and left % MESH[axis] == 0:
                factors.append((MESH[axis], axis))
                free.remove(axis)
                left //= MESH[axis]
            else:
                step = draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0]))
                factors.append((step, WHOLE))
                left //= step
        dims.append(normal(factors))
    partial = [axis for axis in free if draw(st.booleans())]
    return Spec(tuple(dims), frozenset(partial))


def piece(values, spec, device):
    """What one device has of an array."""
    fine = values.reshape([size for factors in spec.dims for size, _ in factors])
    index = tuple(slice(None) if axis == WHOLE else device[axis] for factors in spec.dims for _, axis in factors)
    return fine[index].reshape(spec.local_shape)


def moved_piece(values, shape, dims, device):
    """What one device has before or after a move."""
    spread = {dim: device[axis] for axis, dim in enumerate(dims) if dim >= 0}
    return values.reshape(shape)[
        tuple(slice(spread[d], spread[d] + 1) if d in spread else slice(None) for d in range(len(shape)))
    ]


@settings(max_examples=300)
@given(data=st.data())
def test_moves_lead_from_one_layout_to_the_other(data):
    source = data.draw(layouts())
    target = data.draw(layouts(source.shape)).with_partial(())
    values = np.arange(prod(source.shape))
    steps = moves(source, target, 3)
    assert (source == target) <= (steps == ())
    for device in DEVICES:
        flat = piece(values, source, device).ravel()
        for step in steps:
            assert np.array_equal(flat, moved_piece(values, step.shape, step.source, device).ravel())
            for before, after in zip(step.source, step.target, strict=True):
                assert before == PARTIAL or after != PARTIAL
            flat = moved_piece(values, step.shape, step.target, device).ravel()
        assert np.array_equal(flat, piece(values, target, device).ravel())
    partial = source.partial
    for step in steps:
        assert {axis for axis, dim in enumerate(step.source) if dim == PARTIAL} == partial
        partial = {axis for axis, dim in enumerate(step.target) if dim == PARTIAL}
    assert not partial


@settings(max_examples=300)
@given(data=st.data())
def test_joined_axes_move_the_same(data):
    source = data.draw(layouts())
    target = data.draw(layouts(source.shape)).with_partial(())
    values = np.arange(prod(source.shape))
    for step in moves(source, target, 3):
        joined, mesh = coarsened(step, MESH)
        assert prod(mesh) == prod(MESH)
        coarse = list(itertools.product(*map(range, mesh)))  # row-major, as the devices are
        for device, same in zip(DEVICES, coarse, strict=True):
            for before, after in ((step.source, joined.source), (step.target, joined.target)):
                one = moved_piece(values, step.shape, before, device)
                assert np.array_equal(one.ravel(), moved_piece(values, joined.shape, after, same).ravel())


def test_axes_that_do_the_same_are_joined():
    four = Spec((((2, 0), (2, 1), (3, WHOLE)),))
    (step,) = moves(four, whole((12,)), 2)
    joined, mesh = coarsened(step, (2, 2))
    assert mesh == (4,) and joined.source == (0,) and joined.target == (WHOLE,)
    (step,) = moves(whole((12,)).with_partial({0, 1}), whole((12,)), 2)
    assert coarsened(step, (2, 2))[1] == (4,)


def test_received_elements():
    half = Spec((((2, 0), (4, WHOLE)),))
    assert moved_elements(half, whole((8,)), (2,)) == 4
    assert moved_elements(whole((8,)), half, (2,)) == 0
    assert moved_elements(whole((8,)).with_partial({0}), whole((8,)), (2,)) == 8
    assert moved_elements(whole((8,)).with_partial({0}), half, (2,)) == 4


def test_stored_like_a_dtensor():
    middle = Spec((((3, WHOLE), (2, 1), (16, WHOLE)), ((4, 0), (8, WHOLE))))
    assert storable(middle) == Spec((((2, 1), (48, WHOLE)), ((4, 0), (8, WHOLE))))
    assert storable(storable(middle)) == storable(middle)


ATEN = torch.ops.aten
CALLS = {
    "reshape": (ATEN.reshape.default, lambda x: [[x.shape[0] * x.shape[1], x.shape[2]]]),
    "merge": (ATEN.view.default, lambda x: [[x.shape[0], x.shape[1] * x.shape[2]]]),
    "split up": (ATEN.view.default, lambda x: [[x.shape[0], 2, x.shape[1] // 2, 3, x.shape[2] // 3]]),
    "odd": (ATEN.view.default, lambda x: [[3, -1]]),
    "transpose": (ATEN.transpose.int, lambda x: [0, 2]),
    "permute": (ATEN.permute.default, lambda x: [[2, 0, 1]]),
    "unsqueeze": (ATEN.unsqueeze.default, lambda x: [-1]),
    "squeeze": (ATEN.squeeze.dim, lambda x: [0]),
    "expand": (ATEN.expand.default, lambda x: [[5, *x.shape]]),
    "slice": (ATEN.slice.Tensor, lambda x: [2, 0, x.shape[2] // 3, 1]),
    "slice all": (ATEN.slice.Tensor, lambda x: [1, 0, 9223372036854775807, 1]),
    "slice steps": (ATEN.slice.Tensor, lambda x: [1, 1, 9223372036854775807, 2]),
    "select": (ATEN.select.int, lambda x: [1, -1]),
    "split": (ATEN.split.Tensor, lambda x: [x.shape[2] // 3, 2]),
    "split with sizes": (ATEN.split_with_sizes.default, lambda x: [[1, x.shape[1] - 1], 1]),
    "chunk": (ATEN.chunk.default, lambda x: [3, -1]),
    "unbind": (ATEN.unbind.int, lambda x: [1]),
    "flatten": (ATEN.flatten.using_ints, lambda x: [0, 1]),
    "unflatten": (ATEN.unflatten.int, lambda x: [2, [3, -1]]),
}


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("name", CALLS)
def test_views_of_pieces_are_pieces_of_views(name, data):
    shape = (
        data.draw(st.sampled_from([1, 2, 4])),
        data.draw(st.sampled_from([2, 4, 12])),
        data.draw(st.sampled_from([6, 12, 24])),
    )
    spec = data.draw(layouts(shape)).with_partial(())
    op, arguments = CALLS[name]
    values = torch.arange(prod(shape)).reshape(shape)
    args = arguments(values)
    expected = op(values, *args)
    results = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    for _ in range(4):
        found = view(op, args, spec, [tuple(result.shape) for result in results])
        if found.call is not None:
            break
        assert found.gather and found.gather <= spec.axes
        spec = spec.gathered(found.gather)
    assert found.call is not None
    for device in DEVICES:
        made = found.call(torch.from_numpy(np.ascontiguousarray(piece(values.numpy(), spec, device))))
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        for ours, whole_result, layout in zip(made, results, found.specs, strict=True):
            assert layout.shape == tuple(whole_result.shape)
            assert np.array_equal(ours.numpy(), piece(np.ascontiguousarray(whole_result.numpy()), layout, device))


def test_views_keep_what_they_can():
    """The heads of a fused projection stay where they are through the split into query, key and value."""
    spec = Spec((((4, WHOLE),), ((3, WHOLE), (2, 0), (16, WHOLE))))
    found = view(ATEN.split.Tensor, [32, 1], spec, [(4, 32)] * 3)
    assert all(layout.dims[1] == ((2, 0), (16, WHOLE)) for layout in found.specs)
    heads = view(ATEN.view.default, [[4, 2, 16]], found.specs[0], [(4, 2, 16)])
    assert heads.specs[0].dims == (((4, WHOLE),), ((2, 0),), ((16, WHOLE),))
    thirds = view(ATEN.view.default, [[4, 3, 32]], spec, [(4, 3, 32)])
    assert thirds.specs[0].dims[2] == ((2, 0), (16, WHOLE))


@pytest.fixture(scope="module")
def graph():
    model, inputs = worker.block()
    return forward_graph(model, (), inputs, loss=worker.block_loss)


def ops(graph):
    return {op.rpartition("/")[0]: op for op in graph.op_of_node.values() if op.rpartition("/")[2].startswith("linear")}


def test_fitting_plan(graph):
    plan = worker.plan_of({ops(graph)["up"]: {"n": 2}}, graph.op_of_node.values())
    assert devices_of(plan) == 2
    assert why_not(plan, graph, 2) is None
    assert "start 2" in why_not(plan, graph, 4)
    later = replace(plan, device_of_group=np.array([1], dtype=np.int32))
    assert devices_of(later) == 3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("replicas", [[0, 1], [2, 3]], "replicas"),
        ("recompute", [[0]], "recompute"),
        ("schedule", "1f1b", "schedule '1f1b'"),
        ("stage_of_group", np.zeros(1, dtype=np.int32), "stage_of_group"),
        ("shards", None, "cuts no op"),
        ("shards", {"nothing/linear": {"n": 2}}, "'nothing/linear', which is no op of this model"),
    ],
)
def test_refusals(graph, field, value, message):
    plan = replace(worker.plan_of({ops(graph)["up"]: {"n": 2}}, graph.op_of_node.values()), **{field: value})
    assert message in why_not(plan, graph, 2)


def test_dimensions_that_are_not_there(graph):
    up = ops(graph)["up"]
    assert "m0 of 4, m1 of 6, k of 16, n of 32" in why_not(worker.plan_of({up: {"v": 2}}, [up]), graph, 2)
    assert "along 'm1' into 4" in why_not(worker.plan_of({up: {"m1": 4}}, [up]), graph, 4)


def test_no_mesh(graph):
    up, down = ops(graph)["up"], ops(graph)["down"]
    plan = worker.plan_of({up: {"n": 2}, down: {"m1": 3}}, graph.op_of_node.values())
    assert devices_of(plan) == 3
    reason = why_not(plan, graph, 3)
    assert f"{up!r} is cut into 2 n, which are no axes of a mesh of 3 devices" in reason
    assert reason.endswith("the nearest parts that are: 1 n")
    assert why_not(worker.plan_of({up: {"n": 1}, down: {"m1": 3}}, graph.op_of_node.values()), graph, 3) is None


def test_ops_that_cannot_be_cut_run_whole_and_say_so():
    class Sorting(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4, scale_grad_by_freq=True)
            self.head = nn.Linear(4, 6)

        def forward(self, rows):
            x = self.head(self.table(rows)).sort(-1).values
            return x.clone().view(-1).mul_(2.0).sum()

    model, inputs = Sorting(), {"rows": torch.zeros(4, dtype=torch.long)}
    graph = forward_graph(model, (), inputs)
    by_kind = {op.rpartition("/")[2]: op for op in graph.op_of_node.values()}
    shards = {by_kind["embedding"]: {"m": 2}, by_kind["linear"]: {"m": 2}, by_kind["sum_1"]: {"d.0": 2, "d.1": 4}}
    program = make_program(graph, shards, (2,))
    told = program.report
    assert "no device can do a part" in told[by_kind["embedding"]]
    assert told[by_kind["linear"]] == "cut: m x 2 (axis 0)"
    assert told[by_kind["sort"]].startswith("whole: no rule")
    assert told[by_kind["sum_1"]] == "cut: d x 2 (axis 0); whole along d.1: these inputs have no 4 equal parts of it"
    assert program.home["table.weight"] == whole((8, 4))


def test_parameters_lie_as_their_first_reader_needs_them(graph):
    names = ops(graph)
    shards = {names["up"]: {"n": 2}, names["down"]: {"k": 2}, names["attention.q"]: {"n.1": 2}}
    program = make_program(graph, shards, (2,))
    assert program.home["up.weight"].dims == (((2, 0), (16, WHOLE)), ((16, WHOLE),))
    assert program.home["up.bias"].dims == (((2, 0), (16, WHOLE)),)
    assert program.home["down.weight"].dims == (((16, WHOLE),), ((2, 0), (16, WHOLE)))
    assert program.home["down.bias"] == whole((16,))
    # The second halves of all heads are no shard of a DTensor: stored in two halves, gathered and cut where it is read.
    assert program.home["attention.q.weight"].dims[0] == ((2, 0), (8, WHOLE))


def test_sequence_splits_of_causal_attention_take_their_rows_of_the_mask():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    class Attend(nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v).square().mean()

    graph = forward_graph(Attend(), (), {key: torch.randn(2, 2, 4, 4, requires_grad=True) for key in "qkv"})
    op = next(op for op in graph.op_of_node.values() if "dot_product" in op)
    program = make_program(graph, {op: {"queries": 2}}, (2,))
    step = next(step for step in program.steps if step.way == "cut")
    query, key, _ = (step.demands[position] for position in range(3))
    assert query[0].axes == {0} and not query[1]
    assert not key[0].axes and key[1] == {0}  # read whole; the gradients of all devices add up
