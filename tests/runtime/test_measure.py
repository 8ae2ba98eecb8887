"""Measured step times, and the environments on top of them."""

import pytest
import torch

import rlplace
from rlplace.envs import MeasuredBackend, RefinementEnv
from rlplace.errors import InputError
from rlplace.runtime.measure import step_timer


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_refinement_on_measured_times():
    inputs = (torch.randn(4, 16),)
    graph = rlplace.capture(Model(), inputs)
    problem = rlplace.price(graph, rlplace.Cluster.preset("a100-80g:2"))
    runs = []
    timer = step_timer(Model, ["cpu", "cpu"], inputs, warmup=1, repeats=2)

    def measure(plan):
        runs.append(timer(plan))
        return runs[-1]

    backend = MeasuredBackend(measure)
    env = RefinementEnv([problem], backend=backend, max_moves=2)
    env.reset(seed=0)
    _, reward, _, _, info = env.step(int(env.action_masks()[1:].argmax()) + 1)
    assert len(runs) == 2 and all(seconds > 0 for seconds in runs) and reward >= 0
    env.reset(seed=1)
    *_, info = env.step(0)
    assert info["step_time_s"] == runs[-1]


def test_timer_refuses_a_model_without_loss():
    problem = rlplace.price(rlplace.capture(Model(), (torch.randn(4, 16),)), rlplace.Cluster.preset("a100-80g:2"))
    plan = rlplace.place(problem, planner="single")
    timer = step_timer(Model, ["cpu", "cpu"], (torch.randn(4, 16),), loss=lambda out: out * 2, warmup=1, repeats=1)
    assert timer(plan) > 0
    with pytest.raises(InputError, match="at least one"):
        step_timer(Model, ["cpu"], (), repeats=0)
