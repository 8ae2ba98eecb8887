"""A model recorded from a few of its equal layers is, array by array, the model recorded whole."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from rlplace.model.capture import layers
from rlplace.model.capture.capture import capture
from rlplace.model.zoo.load import load_model


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(self.up(self.norm(x)).relu_()), 0.1, self.training)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


class Loop(nn.Module):
    """Layers in a loop of the user's own, of several kinds."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first = kind, nn.Linear(4, 8)
        self.layers = nn.ModuleList([Block() for _ in range(7)])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x, kept = self.first(x), []
        start = x
        for number, layer in enumerate(self.layers):
            kept.append(x)
            x = layer(x)
            if self.kind == "ends" and number in (0, len(self.layers) - 1):
                x = torch.sin(x)
            if self.kind == "vanishing":
                torch.cos(x)
            if self.kind == "without gradient":
                with torch.set_grad_enabled(number != 5):
                    x = x * 2
            if self.kind == "alternating" and number % 2:
                x = x + start
            if self.kind == "one unlike" and number == 5:
                x = torch.sin(x)
            if self.kind == "skipping" and number >= 5:
                x = x + kept[6 - number]
            if self.kind == "shared" and number:
                x = x * self.scale
        return torch.cos(x) if self.kind == "vanishing" else torch.stack(kept).sum(0) if self.kind == "all" else x


def differing(a, b):
    def equal(x, y):
        if isinstance(x, np.ndarray):
            return x.dtype == y.dtype and np.array_equal(x, y)
        return vars(x) == vars(y) if hasattr(x, "accesses") else x == y

    return [f.name for f in dataclasses.fields(a) if not equal(getattr(a, f.name), getattr(b, f.name))]


def repeated(monkeypatch, model, inputs, **options):
    """Returns the graph of a model whose lists may be repeated, and whether it was made from a few of their elements."""
    real, used = layers.unroll, []
    with monkeypatch.context() as patch:
        patch.setattr(layers, "LEAST", 6)
        patch.setattr(layers, "WORTH", 1)
        patch.setattr(layers, "unroll", lambda *given: used.append(real(*given)) or used[-1])
        return capture(model, inputs, **options), len(used) == 2


MODELS = (  # several outputs of one op, two lists with a first layer of its own, experts and positions that all layers share
    "hf:gpt2,n_layer=6,n_embd=16,n_head=2",
    "hf:t5,num_layers=6,num_decoder_layers=7,d_model=16,d_ff=32,num_heads=2,d_kv=8",
    "hf:mixtral,num_hidden_layers=6,hidden_size=16,num_attention_heads=2,num_key_value_heads=1,intermediate_size=32,"
    "num_local_experts=4",
)


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODELS)
def test_transformers_are_the_same_array_by_array(monkeypatch, spec):
    model = load_model(spec, batch=2, seq=8)
    short, used = repeated(monkeypatch, model.module, model.example_inputs)
    assert used and differing(short, capture(model.module, model.example_inputs)) == []
    if spec == MODELS[0]:  # another size, recorded as this one was
        larger = load_model(spec, batch=4, seq=8)
        after, looked_again = repeated(monkeypatch, larger.module, larger.example_inputs, like=short)
        assert not looked_again and differing(after, capture(larger.module, larger.example_inputs)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "ends", "vanishing"])
def test_own_loops_are_the_same(monkeypatch, kind):
    model, inputs = Loop(kind).bfloat16(), (torch.randn(4, 4).bfloat16(),)
    options = {"loss": torch.mean, "autocast": "bf16", "master_weights": True}
    short, used = repeated(monkeypatch, model, inputs, **options)
    assert used and differing(short, capture(model, inputs, **options)) == []


def test_convolutions_with_statistics_are_the_same(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(*[Convolution() for _ in range(7)]), nn.Flatten(), nn.LazyLinear(2))
    images = torch.randn(2, 3, 8, 8)
    model(images)
    short, used = repeated(monkeypatch, model, images, loss=torch.mean)
    assert used and differing(short, capture(model, images, loss=torch.mean)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alternating", "one unlike", "skipping", "shared", "all", "without gradient"])
def test_unlike_layers_are_recorded_whole(monkeypatch, kind):
    assert not repeated(monkeypatch, Loop(kind), (torch.randn(4, 4),), loss=torch.mean)[1]


@pytest.mark.parametrize("frozen", [slice(0, 4), slice(6, 7)])
def test_frozen_layers_are_recorded_whole(monkeypatch, frozen):
    model, inputs = Loop("plain"), (torch.randn(4, 4),)
    model.layers[frozen].requires_grad_(False)
    whole, used = repeated(monkeypatch, model, inputs, loss=torch.mean)
    assert not used and differing(whole, capture(model, inputs, loss=torch.mean)) == []


def test_lists_that_save_little_or_differ_stay_whole():
    assert layers.repeated_lists(nn.Sequential(nn.Sequential(*[Block() for _ in range(9)]))) == {}
    assert layers.repeated_lists(nn.Sequential(nn.Sequential(*[Block() for _ in range(10)]))) == {"0": 10}
    assert layers.repeated_lists(nn.Sequential(nn.Sequential(*[Block(8 + i % 2) for i in range(20)]))) == {}
