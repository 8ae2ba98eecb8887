"""Meshes, layouts and views of the sharded engine, without processes."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.runtime.distributed.sharded.mesh import factor_mesh, nearest_shards
from rlplace.runtime.distributed.sharded.program import storable
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
