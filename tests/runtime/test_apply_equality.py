"""Loss, outputs, every gradient and three optimizer steps equal the unplaced model's, own backward functions included."""

import copy
import functools

import pytest
import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.runtime.placement.apply import apply
from tests.runtime import equality, sim_device, small_models


class Triple(torch.autograd.Function):
    """Doubles, with another gradient than that."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


QUICK = ("gpt2", "t5", "resnet", "lstm", "awkward")


@functools.cache
def op_names(name):
    """The export of a model is the same for every test."""
    torch.manual_seed(0)
    model, inputs, _ = small_models.MODELS[name]()
    return equality.op_names(model, inputs)


def build(name):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]()
    return model, copy.deepcopy(model), inputs, loss_of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in small_models.MODELS]
)
def test_random_plan_on_four_devices_trains_with_adam(sim, name):
    model, reference, inputs, loss_of = build(name)
    plan = equality.random_plan(op_names(name), 4, seed=1)
    placed = apply(model, plan, sim(4), example_inputs=inputs)
    assert placed is model
    equality.train_both(placed, reference, inputs, loss_of, equality.adam)
    assert len({copy.source for copy in sim_device.copies if copy.source != "cpu"}) >= 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(Triple.apply(self.first(x))).sum()


def test_functions_with_their_own_backward_are_refused(sim):
    torch.manual_seed(0)
    model, inputs = Net(), {"x": torch.randn(3, 4)}
    plan = equality.random_plan(equality.op_names(model, inputs), 2, seed=0)
    with pytest.raises(InputError, match=r"Triple, whose own backward an exported graph would lose.*plan a strategy"):
        apply(model, plan, sim(2), example_inputs=inputs)
    assert "forward" not in vars(model) and float(Triple.apply(torch.ones(1))) == 2.0
