"""Packed weights: what they hold, what a step keeps of them, and what capture says of their bytes and ops."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import rlplace
from rlplace.errors import InputError
from rlplace.model.graph.opgraph import FORWARD
from rlplace.model.quantize import QuantizedLinear, dequantize, quantize


def linear(how, rows=48, columns=128):
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows).requires_grad_(False)
    return layer, QuantizedLinear(layer, how)


def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    layer, packed = linear("nf4")
    theirs, state = functional.quantize_4bit(layer.weight.data, blocksize=64, quant_type="nf4")
    assert torch.equal(packed.packed.flatten(), theirs.flatten())
    assert torch.equal(packed.scale.flatten(), state.absmax)
    assert torch.allclose(dequantize(packed.packed, packed.scale), functional.dequantize_4bit(theirs, state), atol=1e-7)


def test_levels_are_exact_and_others_are_near():
    # Levels times a scale come back exactly; the widest gap between levels, 0.30, bounds the error of other values.
    layer, packed = linear("nf4")
    again = QuantizedLinear(layer.requires_grad_(False), "nf4")
    layer.weight.data = dequantize(packed.packed, packed.scale)
    assert torch.equal(dequantize(*_parts(QuantizedLinear(layer, "nf4"))), layer.weight)
    layer, packed = linear("nf4")
    error = (dequantize(*_parts(again)) - layer.weight).unflatten(1, (-1, 64)).abs()
    assert (error <= 0.1521 * again.scale.unsqueeze(-1)).all()
    layer, packed = linear("int8")
    assert ((dequantize(*_parts(packed)) - layer.weight).abs() <= 0.5001 * packed.scale).all()


def _parts(module):
    return module.packed, module.scale


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_trains_what_is_before_it_as_the_unpacked_weight_does(how):
    layer, packed = linear(how)
    layer.weight.data = dequantize(*_parts(packed))
    value = torch.randn(2, 5, 128)
    results = []
    for module in (layer, packed):
        own, kept = value.clone().requires_grad_(), set()
        with saved_tensors_hooks(lambda tensor, kept=kept: kept.add(tensor.numel()) or tensor, lambda tensor: tensor):
            made = module(own)
        made.square().sum().backward()
        results.append((made.detach(), own.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert kept == {packed.packed.numel(), packed.scale.numel()}  # and no unpacked weight


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))
        self.first = nn.Linear(128, 128)
        self.layers.requires_grad_(False)

    def forward(self, x):
        return self.layers(self.first(x)).square().mean()


def test_a_captured_step_unpacks_in_both_passes_and_holds_packed_bytes():
    inputs = (torch.randn(4, 128),)
    plain, packed = rlplace.capture(Adapted(), inputs), rlplace.capture(quantize(Adapted(), "nf4"), inputs)
    frozen = lambda graph: sum(p.size_bytes for p in graph.parameters if not p.trainable)  # noqa: E731
    assert frozen(plain) == 3 * 128 * 128 * 4
    assert frozen(packed) == 3 * (128 * 128 // 2 + 128 * 2 * 4)  # half a byte a weight, and a scale for 64
    unpacked = [n for n, target in enumerate(packed.op_target) if target == "rlplace.dequantize.default"]
    assert len(unpacked) == 3 and all(packed.op_bytes[n] >= 128 * 128 * 4 for n in unpacked)
    products = lambda graph: sum(graph.op_flops[n] for n, kind in enumerate(graph.op_kind) if kind == "gemm")  # noqa: E731
    assert products(packed) == pytest.approx(products(plain) + 3 * 128 * 128)  # with the work of unpacking in the backward
    assert all(packed.op_dims[n + 1]["k"] == 128 for n in unpacked if packed.op_phase[n + 1] == FORWARD)


def test_refusals():
    with pytest.raises(InputError, match="Linear has no frozen linear layer to quantize; freeze some"):
        quantize(nn.Linear(64, 64), "nf4")
    with pytest.raises(InputError, match="reads 48 features, no multiple of 64"):
        quantize(nn.Sequential(nn.Linear(48, 64)).requires_grad_(False), "nf4")
    with pytest.raises(InputError, match=r"format of weights .*nf4"):
        quantize(nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), "nf3")
