"""A model with a gradient of its own trains like itself: op level is refused, module level keeps the function."""

import copy

import equality
import pytest
import torch
from own_backward import Triple
from torch import nn

from rlplace.errors import InputError
from rlplace.runtime.apply import apply


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(Triple.apply(self.first(x))).sum()


def test_functions_with_their_own_backward_keep_it(sim):
    torch.manual_seed(0)
    model, inputs = Net(), {"x": torch.randn(3, 4)}
    reference = copy.deepcopy(model)
    plan = equality.random_plan(equality.op_names(model, inputs), 2, seed=0)
    with pytest.raises(InputError, match="Triple, whose own backward an exported graph would lose"):
        apply(copy.deepcopy(model), plan, sim(2), example_inputs=inputs, level="op")
    placed = apply(model, plan, sim(2), example_inputs=inputs)
    assert placed.report.level == "module" and "own backward" in placed.report.why_not_op
    equality.assert_same_step(placed, reference, inputs, lambda loss: loss)
    assert float(Triple.apply(torch.ones(1))) == 2.0


def test_distributed_runs_refuse_them():
    from rlplace.runtime.distributed.graph.forward_graph import forward_graph

    with pytest.raises(InputError, match=r"Triple, whose own backward an exported graph would lose.*level='module'"):
        forward_graph(Net(), (torch.randn(3, 4),), {})
