"""`place` for a global batch or again until it fits, and wrong arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace import Cluster
from rlplace.cluster.parse import parse
from rlplace.errors import InfeasibleError, InputError
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model
from rlplace.placement.ask import Priced, place_priced
from rlplace.problem.generate import random_problem


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

    priced = Priced.of(capture_at(16), parse("t4:2"), capture_at)
    assert priced.at(16).samples_per_microbatch == 16
    with pytest.raises(InputError, match="asked for a batch of 8 samples and has one of 16; let its function take"):
        priced.at(8)


GPT2 = "hf:gpt2,n_layer=4,n_embd=128,n_head=4,vocab_size=512"


@pytest.fixture(scope="module")
def graph():
    model = load_model(GPT2, batch=8, seq=64, dtype="fp32")
    return capture(model.module, model.example_inputs)


def priced(graph, memory_bytes):
    cluster = parse("a100-80g:2")
    devices = tuple(dataclasses.replace(d, memory_bytes=memory_bytes, reserved_bytes=0) for d in cluster.devices)
    return Priced.of(graph, dataclasses.replace(cluster, devices=devices), groups=24)


@pytest.mark.slow
def test_a_plan_is_made_again_until_it_fits_op_by_op(graph):
    """The finer problem is made to need more, as with models whose tasks hide what their ops hold."""

    def heavier(inner):
        def build(graph, level="task"):
            problem = inner(graph, level=level)
            if level != "op":
                return problem
            return dataclasses.replace(problem, tensor_bytes=np.ceil(problem.tensor_bytes * 1.4).astype(np.int64))

        return build

    target = priced(graph, 33 * 10**6)
    target = dataclasses.replace(target, build=heavier(target.build))
    placed = place_priced(target, planner="best")
    assert placed.plan.predicted.op_level.feasible
    assert sum(placed.plan.predicted.held_back_bytes) > 0
    assert placed.plan.problem == target.first.fingerprint  # of the problem with all its memory


def test_nothing_is_held_back_where_the_plan_fits(graph):
    placed = place_priced(priced(graph, 10**12), planner="best")
    assert not placed.plan.predicted.held_back_bytes and placed.plan.predicted.op_level.feasible


def test_what_never_fits_is_infeasible(graph):
    with pytest.raises(InfeasibleError):
        place_priced(priced(graph, 10**6), planner="best")


CLUSTER = Cluster.preset("l4:2")


def test_capture_price_and_place() -> None:
    graph = rlplace.capture(nn.Linear(2, 2), torch.zeros(2, 2), loss=torch.sum)
    assert rlplace.price(graph, "l4:2").num_devices == 2
    problem = random_problem(0, num_groups=4, num_devices=2)
    wrong: list[Any] = [
        lambda: rlplace.capture(5, torch.zeros(2)),  # type: ignore[arg-type]
        lambda: rlplace.capture(nn.Linear, torch.zeros(2)),  # type: ignore[arg-type]
        lambda: rlplace.capture(nn.Linear(2, 2), torch.zeros(2, 2), loss=5),  # type: ignore[arg-type]
        lambda: rlplace.price(problem, CLUSTER),  # type: ignore[arg-type]
        lambda: rlplace.price(graph, 5),  # type: ignore[arg-type]
        lambda: rlplace.price(graph, CLUSTER, groups="x"),  # type: ignore[arg-type]
        lambda: rlplace.price(graph, CLUSTER, groups=0),
        lambda: rlplace.place(graph, 5, planner="best"),  # type: ignore[arg-type]
        lambda: rlplace.place(problem, planner="random", seed=-1),
        lambda: rlplace.place(problem, planner="random", seed="x"),  # type: ignore[arg-type]
        lambda: rlplace.simulate(problem, [0] * 4, order=[5, 6]),  # type: ignore[list-item]
        lambda: rlplace.simulate(problem, [0] * 4, order="xy"),
        lambda: rlplace.simulate(problem, [0] * 4, order=[["a", 1], []]),  # type: ignore[list-item]
        lambda: Cluster.preset(5),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(InputError) as raised:
            call()
        assert len(str(raised.value)) < 300 and "\n" not in str(raised.value)
