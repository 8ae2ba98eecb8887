"""Choices of routers that hang on rounding, in the model that a run is compared with."""

import torch
from torch import nn

from rlplace.runtime.job.verify import Choices, Reference

RATE = 0.125


class Routed(nn.Module):
    """Two experts of one weight each; a token goes to the one with the larger score."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, scores):
        return self.experts[scores.topk(1).indices].square().mean()


def slack(scores):
    model = Routed()
    reference = Reference(model, torch.optim.Adam(model.parameters(), lr=RATE), torch.device("cpu"), lambda value: value)
    reference.step({"scores": scores}, 1e-4)
    return reference.unsure, float(reference.slack["experts"].max())


def test_near_ties_are_counted_and_equal_or_clear_scores_are_not():
    near = torch.tensor([[1.0, 1.0 - 1e-6, 0.5], [1.0, 0.9, 0.5], [1.0, 1.0, 0.5]])
    with Choices(1e-4) as choices:
        near.topk(1), torch.topk(near, 3), near.max(-1)
    assert choices.unsure == 1


def test_updates_behind_an_unsure_choice_may_be_others():
    assert slack(torch.tensor([[1.0, 1.0 - 1e-6], [0.0, 1.0]])) == (1, 2 * RATE)
    unsure, moved = slack(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    assert unsure == 0 and moved < 0.01 * RATE
