"""Which engine runs which plan, and what a refusal says."""

import gc
import weakref

import numpy as np
import pytest
import torch

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base.steps import check_inputs
from rlplace.runtime.job.distribute import distribute
from tests.runtime.job.equal import build
from tests.runtime.job.launch import run
from tests.runtime.job.plans import plan_of


def changed(plan, **fields):
    return PlacementPlan(**{**vars(plan), **fields})


class ByRank(torch.nn.Module):
    """A forward that may differ between processes."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.late = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), False

    def forward(self, x):
        x = self.up(x)
        return self.down(x.relu() if self.late else x).square().mean()


def refusals():
    model, inputs, _ = build("gpt2", double=False)
    plan = plan_of(model, inputs, 2, deal=[0, 1, 0, 1, 0, 1])
    found = []
    apart = np.array([0, 1, 0, 1, torch.distributed.get_rank(), 1], dtype=np.int32)
    for options, change in (
        ({"share": "mine"}, {}),
        ({}, {"device_of_group": np.array([0, 1, 2, 1, 0, 1], dtype=np.int32)}),
    ):
        with pytest.raises(InputError) as caught:
            distribute(model, changed(plan, **change), inputs, **options)
        found.append(str(caught.value))
    with pytest.raises(InputError) as caught:
        distribute(model, changed(plan, device_of_group=apart), inputs)
    found.append(str(caught.value))
    wrong, _, _ = build("bert", double=False)
    with pytest.raises(InputError) as caught:
        distribute(wrong, plan, inputs)
    found.append(str(caught.value))
    uneven, x = ByRank(), {"x": torch.ones(2, 4)}
    of_one = plan_of(uneven, x, 2, deal="chain", groups=2)
    assert float(distribute(uneven, of_one, x)(**x).detach()) > 0
    uneven.late = torch.distributed.get_rank() == 1
    with pytest.raises(InputError) as caught:
        distribute(uneven, of_one, x)
    return found, str(caught.value)


def freed():
    model, inputs, _ = build("gpt2", double=False)
    plan = plan_of(model, inputs, 2, deal="chain")
    watched = weakref.ref(model)
    total = sum(p.numel() for p in model.parameters())
    placed = distribute(model, plan, inputs)
    del model
    gc.collect()
    placed(**inputs).loss.backward()
    return watched() is None, sum(p.numel() for p in placed.parameters()) < total


def everything():
    return refusals(), freed()


@pytest.fixture(scope="module")
def found():
    """What two processes saw."""
    return list(zip(*run(2, everything), strict=True))


@pytest.mark.slow
def test_refusals_on_a_job(found):
    (first, other), (second, another) = found[0]
    assert first == second
    for text, rank, op in ((other, 0, "%linear_1 :"), (another, 1, "%relu :")):
        assert "ranks 0 and 1 traced different forwards" in text and f"(rank {rank} has there: {op}" in text, text
    expected = ("'mine'", "3 devices", "different plans", "another model")
    for text, part in zip(first, expected, strict=True):
        assert part in text and "\n" not in text, text


@pytest.mark.slow
def test_weights_of_others_are_freed(found):
    for gone, fewer in found[1]:
        assert gone and fewer


def test_nothing_runs_without_a_process_group():
    model, inputs, _ = build("lstm", double=False)
    plan = plan_of(model, inputs, 2, deal="chain")
    assert not torch.distributed.is_initialized()
    with pytest.raises(InputError, match="torchrun"):
        distribute(model, plan, inputs)


def test_inputs_that_require_a_gradient_are_refused():
    check_inputs((((torch.ones(2),), {"scale": 2.0}),))
    with pytest.raises(InputError, match="an input requires a gradient"):
        check_inputs((((), {"input": torch.ones(2, requires_grad=True)}),))
