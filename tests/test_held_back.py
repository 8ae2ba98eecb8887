"""Plans that fit task by task and not op by op are made again with room held back."""

import dataclasses

import numpy as np
import pytest

from rlplace.cluster.parse import parse
from rlplace.errors import InfeasibleError
from rlplace.graph.capture import capture
from rlplace.placing import Priced, place_priced
from rlplace.zoo import load_model

GPT2 = "hf:gpt2,n_layer=4,n_embd=128,n_head=4,vocab_size=512"


@pytest.fixture(scope="module")
def graph():
    model = load_model(GPT2, batch=8, seq=64, dtype="fp32")
    return capture(model.module, model.example_inputs)


def priced(graph, memory_bytes):
    cluster = parse("a100-80g:2")
    devices = tuple(dataclasses.replace(d, memory_bytes=memory_bytes, reserved_bytes=0) for d in cluster.devices)
    return Priced.graph(graph, dataclasses.replace(cluster, devices=devices), groups=24)


def test_a_plan_is_made_again_until_it_fits_op_by_op(graph):
    """The finer problem is made to need more, as with models whose tasks hide what their ops hold."""

    def heavier(inner):
        def build(graph, level):
            problem = inner(graph, level)
            if level != "op":
                return problem
            return dataclasses.replace(problem, tensor_bytes=np.ceil(problem.tensor_bytes * 1.5).astype(np.int64))

        return build

    target = priced(graph, 40 * 10**6)
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
