"""Caches of keys and values, off in captures and in distributed models, and of functions; the user's model is unchanged."""

import functools

import pytest
import torch
from torch import nn

from rlplace.model.capture.caches import caches_off
from rlplace.model.capture.capture import capture
from rlplace.runtime.strategy.facts import facts_of
from tests.runtime import small_models

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5"])
def test_models_that_cache_by_default_are_planned_on_every_axis(name):
    model, inputs, _ = getattr(small_models, name)()
    assert model.config.use_cache is True
    facts = facts_of(model, inputs)
    assert facts.no_cut is facts.handed is facts.tensor.no_tensor is None
    assert model.config.use_cache is True


def test_a_capture_holds_no_cache():
    model, inputs, _ = small_models.llama()
    graph = capture(model, inputs)
    assert graph.capture["method"] == "export"
    assert model.config.use_cache is True
    model.config.use_cache = False
    assert capture(model, inputs).fingerprint == graph.fingerprint


def test_the_model_is_as_before_after_an_error():
    model, _, _ = small_models.llama()
    with pytest.raises(ZeroDivisionError), caches_off(model):
        assert model.config.use_cache is False
        raise ZeroDivisionError
    assert model.config.use_cache is True


def test_configurations_of_other_libraries_are_left_alone():
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"use_cache": True})()
    with caches_off(model):
        assert model.config.use_cache is True
    capture(model, torch.ones(2, 2), loss=torch.sum)


@functools.lru_cache
def positions(length):
    return torch.arange(length, dtype=torch.float32)


def keeping(function):
    kept = functools.lru_cache(function)
    return functools.wraps(function)(lambda *args: kept(*args))


class Remembering(nn.Module):
    """Remembers constants in caches of functions, as RT-DETR does its anchors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @staticmethod
    @keeping
    def scales(length):
        return torch.ones(length)

    def forward(self, x):
        return (self.layer(x) * self.scales(4) + positions(4)).square().mean()


def test_a_capture_leaves_no_fake_tensors_in_caches_of_functions():
    model, x = Remembering(), torch.ones(2, 4)
    for plan in (capture, lambda model, x: facts_of(model, {"x": x})):
        plan(model, x)
        assert type(Remembering.scales(4)) is type(positions(4)) is torch.Tensor
