"""Plans that all processes of a job time together."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.model.zoo import LoadedModel
from rlplace.plan.plan import make_plan
from rlplace.runtime.job.distribute import distribute
from rlplace.runtime.job.measure import plan_timer
from tests.runtime.job.plans import plan_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x):
        return (self.layers(x) ** 2).mean()


def loss_of(output):
    return output


class Paired(nn.Module):
    """Has an input of its own that is called as the target of a loss is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, target):
        return ((self.second(self.first(x).relu()) - target) ** 2).mean()


def own_target():
    """The loss of `Paired`, distributed and not; and what a loss with a target of its own says."""
    torch.manual_seed(1)
    model, inputs = Paired(), {"x": torch.randn(4, 4), "target": torch.randn(4, 4)}
    plan = plan_of(model, inputs, 2, loss=loss_of, deal="chain", groups=2)
    placed = distribute(model, plan, inputs, loss=loss_of)
    try:
        distribute(model, plan, inputs, loss=lambda output, wanted: output)
    except InputError as error:
        refused = str(error)
    return float(placed(**inputs).detach()), float(model(**inputs).detach()), refused


def time_all():
    """What this process saw: a plan that runs, one that no engine runs, and one after it."""
    torch.manual_seed(0)
    model = LoadedModel(module=Net(), example_inputs={"x": torch.randn(4, 16)}, loss=loss_of, name="net")
    graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss)
    problem = rlplace.price(graph, "cpu:2", groups=4)
    timer, found = plan_timer(model, torch.device("cpu")), {"own target": own_target()}
    chain = np.arange(problem.num_groups, dtype=np.int32) * 2 // problem.num_groups
    plan = make_plan(problem, chain, planner="t")
    found["computed"] = timer(plan, problem)
    try:
        timer(dataclasses.replace(plan, device_of_group=chain + 1), problem)
    except InputError as error:
        found["refused"] = str(error)
    found["after"] = timer(plan, problem)
    return found
