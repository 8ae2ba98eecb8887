"""Captured graphs that several tests of planners share."""

import pytest

from rlplace.problem.generate import random_problem


def captured(spec):
    import torch

    import rlplace
    from rlplace.model.zoo.load import load_model

    torch.set_num_threads(1)
    model = load_model(spec, batch=32, seq=128)
    graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss)
    return rlplace.price(graph, "a100-80g:4", groups=120, name=spec)


@pytest.fixture(scope="session")
def compiler_graphs():
    """The five graphs on which `compiler` is checked: two generated, two convolutional ones with branches, one transformer."""
    return [
        random_problem(1, 120, 4, shape="layered", width=8),
        random_problem(1, 120, 4, shape="branchy", width=8),
        captured("zoo:inception"),
        captured("zoo:nasnet"),
        captured("hf:gpt2,n_layer=4"),
    ]
