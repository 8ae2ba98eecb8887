"""Forwards of real models as graphs: plans that name their ops, and what processes compare."""

import pytest
import torch

from rlplace.runtime.placement.forward_graph import forward_graph, graph_lines
from tests.runtime import small_models


class Scaled(torch.nn.Module):
    def __init__(self, factor=2.0, device="cpu", literal=1.0):
        super().__init__()
        self.layer, self.factor, self.device, self.literal = torch.nn.Linear(4, 4), factor, device, literal

    def forward(self, x):
        mask = torch.ones(4, device=self.device).to(x.device)
        return (self.layer(x * mask) * self.factor + torch.tensor([self.literal, 3.0, 0.0, 0.0])).square().mean()


def lines(model, inputs):
    return graph_lines(forward_graph(model, (), inputs))


@pytest.mark.slow
def test_the_same_model_gives_the_same_lines():
    both = []
    for seed in (0, 1):  # the values of the parameters do not matter
        torch.manual_seed(seed)
        model, inputs, _ = small_models.mixtral()
        both.append(lines(model, inputs))
    assert both[0] == both[1]
    assert len(both[0]) > 20


def test_arguments_and_constants_are_told_apart():
    x = {"x": torch.ones(2, 4)}
    first = lines(Scaled(), x)
    assert lines(Scaled(), x) == first
    other = lines(Scaled(factor=3.0), x)
    assert [(a.split()[0], b.split()[0]) for a, b in zip(first, other, strict=True) if a != b] == [("%mul_1", "%mul_1")]
    other = lines(Scaled(literal=5.0), x)
    assert [number for number, (a, b) in enumerate(zip(first, other, strict=True)) if a != b] == [len(first) - 1]


def test_the_number_of_a_device_is_left_out():
    x = {"x": torch.ones(2, 4)}
    on_first, on_second = (lines(Scaled(device=f"cuda:{number}"), x) for number in (0, 1))
    assert on_first == on_second != lines(Scaled(), x)


def test_graphs_inside_the_graph_count():
    class Branching(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (x * self.factor).square().mean()

    x = {"x": torch.ones(2, 4)}
    assert lines(Branching(2.0), x) == lines(Branching(2.0), x) != lines(Branching(3.0), x)
