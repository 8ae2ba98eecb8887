"""`place` for a global batch, from a model."""

import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.graph.capture import capture
from rlplace.placing import Priced


class Stubborn(nn.Module):
    """Has a batch of 16, whatever it is asked for."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).sum()


def capture_at(samples):
    return capture(Stubborn(), (torch.zeros(16, 8),), loss=lambda loss: loss)


def test_a_model_that_keeps_its_batch_is_refused_by_name():
    from rlplace.cluster.parse import parse

    priced = Priced.model(capture_at(16), capture_at, parse("t4:2"))
    assert priced.at(16).samples_per_microbatch == 16
    with pytest.raises(InputError, match="asked for a batch of 8 samples and has one of 16; let its function take"):
        priced.at(8)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", 1 << 40])
def test_global_batches_out_of_range_are_refused(value):
    problem = rlplace.price(capture_at(16), "t4:2")
    with pytest.raises(InputError, match="global_batch must be a whole number from 1 to 16777216"):
        rlplace.place(problem, planner="best", global_batch=value)
