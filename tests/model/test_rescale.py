"""A graph at a third batch size, made from captures at two, is the capture at that size."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace.cost import price
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.capture.weight_gradients import split_weight_gradients
from rlplace.model.graph.rescale import rescale, two_captures
from rlplace.model.zoo import load_model
from tests.captured import SMALL

MODELS = ("gpt2", "resnet", "mixtral", "lstm", "dlrm")


def at_batch(name, batch):
    model = load_model(SMALL[name], batch=batch, seq=16)
    source = {"model": name, "batch": batch}
    return capture(model.module, model.example_inputs, loss=model.loss, source=source)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("gpt2", "lstm"))) for n in MODELS])
def test_a_third_size_is_exact(name):
    two, five, seven = (at_batch(name, batch) for batch in (2, 5, 7))
    for a, b, c in ((two, five, seven), (seven, two, five), (five, seven, two)):
        found = rescale(a, b, c.samples)
        kinds = {field: getattr(c, field) for field in ("op_kind", "op_target", "op_dtype")}  # dominance may change: see below
        assert replace(found, **kinds).fingerprint == c.fingerprint
        assert found.source is None
    assert rescale(two, five, 2).fingerprint == two.fingerprint
    assert two.op_flops.sum() < five.op_flops.sum() < seven.op_flops.sum()


def test_kinds_come_from_the_nearer_capture():
    two, seven = at_batch("resnet", 2), at_batch("resnet", 7)
    other = replace(seven, op_kind=tuple("other" for _ in seven.op_kind))
    assert rescale(two, other, 3).op_kind == two.op_kind
    assert rescale(two, other, 6).op_kind == other.op_kind


def test_groups_and_residents_do_not_depend_on_the_batch():
    two, five = at_batch("gpt2", 2), at_batch("gpt2", 5)
    problems = [price(rescale(two, five, batch), "a100-80g:2", groups=1000, host="compiled") for batch in (1, 2, 64)]
    assert len({problem.group_names for problem in problems}) == 1
    assert [problem.samples_per_microbatch for problem in problems] == [1, 2, 64]
    assert all(
        np.array_equal(p.resident_bytes - p.weight_bytes, problems[0].resident_bytes - problems[0].weight_bytes)
        for p in problems
    )
    assert problems[2].time_s.sum() > problems[0].time_s.sum()


def test_rescaling_and_splitting_commute():
    two, five = at_batch("gpt2", 2), at_batch("gpt2", 5)
    later = split_weight_gradients(rescale(two, five, 8))[0]
    sooner = rescale(*(split_weight_gradients(graph)[0] for graph in (two, five)), 8)
    assert later.op_names == sooner.op_names
    np.testing.assert_allclose(later.op_flops, sooner.op_flops, rtol=1e-3)
    np.testing.assert_allclose(later.op_bytes, sooner.op_bytes, rtol=0.02)


def linear(batch, width=8, layers=2):
    return capture(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), torch.empty(batch, width), loss=torch.sum)


def test_what_is_affine_in_the_batch():
    small, large = linear(2), linear(4)
    found = rescale(small, large, 1000)
    op = found.op_names.index("1/linear_1")
    assert found.op_flops[op] == 2 * 1000 * 8 * 8
    assert found.op_bytes[op] == 4 * (2 * 1000 * 8 + 8 * 8 + 8)
    update = found.op_names.index("0.weight/update")
    assert (found.op_flops[update], found.op_bytes[update]) == (small.op_flops[update], small.op_bytes[update])
    assert found.parameters == small.parameters
    assert found.samples == 1000


def test_structures_that_differ_are_refused():
    small = linear(2)
    with pytest.raises(InputError, match=r"at 2 and 4 samples have \d+ and \d+ ops"):
        rescale(small, linear(4, layers=3), 8)
    with pytest.raises(InputError, match=r"parameter '0.weight' differs"):
        rescale(small, linear(4, width=16), 8)
    with pytest.raises(InputError, match="both graphs have 2 samples"):
        rescale(small, linear(2), 8)
    with pytest.raises(InputError, match="samples must be a whole number from 1 up, found 0"):
        rescale(small, linear(4), 0)
    large = linear(4)
    for many in (1 << 59, 1 << 200):
        with pytest.raises(InputError, match="more than a graph can count"):
            rescale(small, large, many)
    with pytest.raises(InputError, match="op '0/linear' differs in op_names between 2 and 4 samples: '0/linear' and '0/other'"):
        rescale(small, replace(large, op_names=("0/other", *large.op_names[1:])), 8)
    with pytest.raises(InputError, match=r"op_target between 2 and 4 samples: 'aten\.linear\.default' and 'aten\.mm\.default'"):
        rescale(small, replace(large, op_target=("aten.mm.default", *large.op_target[1:])), 8)
    with pytest.raises(InputError, match="tensor_role differs"):
        role = large.tensor_role.copy()
        role[role == 0] = 3
        rescale(
            small,
            replace(large, tensor_role=role, tensor_producer=np.where(role == 3, -1, large.tensor_producer).astype(np.int32)),
            8,
        )
    with pytest.raises(InputError, match="other named dimensions"):
        rescale(small, replace(large, op_dims={}), 8)


def test_nothing_becomes_negative():
    small, large = linear(2), linear(4)
    shrinking = (
        replace(large, op_temporary_bytes=large.op_temporary_bytes * 0),
        replace(small, op_temporary_bytes=small.op_temporary_bytes * 0 + 100),
    )
    with pytest.raises(InputError, match=r"op_temporary_bytes\[0\] is 100 at 2 and 0 at 4 samples and would be negative at 5"):
        rescale(shrinking[1], shrinking[0], 5)
    assert (rescale(shrinking[1], shrinking[0], 3).op_temporary_bytes == 50).all()


class Graphs(nn.Module):
    """Ten nodes a graph, and one target a graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))

    def forward(self, nodes, target):
        return {"loss": (self.layers(nodes).unflatten(0, (-1, 10)).mean(1) - target).square().mean()}


def test_a_model_of_one_size_says_which_tensor_must_have_a_row_a_sample():
    inputs = {"nodes": torch.randn(40, 4), "target": torch.randn(4, 8)}
    with pytest.raises(
        InputError, match=r"runs with 40 samples, .* not with others: cannot capture Graphs: .*; the first tensor"
    ):
        rlplace.place(Graphs(), "cpu:2", example_inputs=inputs, calls=9)
    with pytest.raises(InputError, match=r"a batch of 20 is asked for, and the first tensor of its inputs has 40 rows"):
        two_captures(capture(Graphs(), inputs), lambda samples: capture(Graphs(), inputs))
