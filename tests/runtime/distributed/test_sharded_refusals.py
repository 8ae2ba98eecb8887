"""What the sharded engine refuses before anything is started, and how it says what it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sharded_worker as worker
import torch
from torch import nn
from torch.nn import functional as F

from rlplace.runtime.distributed.graph.forward_graph import forward_graph
from rlplace.runtime.distributed.sharded.program import make_program
from rlplace.runtime.distributed.sharded.refuse import devices_of, why_not
from rlplace.runtime.distributed.sharded.spec import WHOLE, whole


@pytest.fixture(scope="module")
def graph():
    model, inputs = worker.block()
    return forward_graph(model, (), inputs, loss=worker.block_loss)


def ops(graph):
    return {op.rpartition("/")[0]: op for op in graph.op_of_node.values() if op.rpartition("/")[2].startswith("linear")}


def test_fitting_plan(graph):
    plan = worker.plan_of({ops(graph)["up"]: {"n": 2}}, graph.op_of_node.values())
    assert devices_of(plan) == 2
    assert why_not(plan, graph, 2) is None
    assert "start 2" in why_not(plan, graph, 4)
    later = replace(plan, device_of_group=np.array([1], dtype=np.int32))
    assert devices_of(later) == 3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("replicas", [[0, 1], [2, 3]], "replicas"),
        ("recompute", [[0]], "recompute"),
        ("schedule", "1f1b", "schedule '1f1b'"),
        ("stage_of_group", np.zeros(1, dtype=np.int32), "stage_of_group"),
        ("shards", None, "cuts no op"),
        ("shards", {"nothing/linear": {"n": 2}}, "'nothing/linear', which is no op of this model"),
    ],
)
def test_refusals(graph, field, value, message):
    plan = replace(worker.plan_of({ops(graph)["up"]: {"n": 2}}, graph.op_of_node.values()), **{field: value})
    assert message in why_not(plan, graph, 2)


def test_dimensions_that_are_not_there(graph):
    up = ops(graph)["up"]
    assert "m0 of 4, m1 of 6, k of 16, n of 32" in why_not(worker.plan_of({up: {"v": 2}}, [up]), graph, 2)
    assert "along 'm1' into 4" in why_not(worker.plan_of({up: {"m1": 4}}, [up]), graph, 4)


def test_no_mesh(graph):
    up, down = ops(graph)["up"], ops(graph)["down"]
    plan = worker.plan_of({up: {"n": 2}, down: {"m1": 3}}, graph.op_of_node.values())
    assert devices_of(plan) == 3
    reason = why_not(plan, graph, 3)
    assert f"{up!r} is cut into 2 n, which are no axes of a mesh of 3 devices" in reason
    assert reason.endswith("the nearest parts that are: 1 n")
    assert why_not(worker.plan_of({up: {"n": 1}, down: {"m1": 3}}, graph.op_of_node.values()), graph, 3) is None


def test_ops_that_cannot_be_cut_run_whole_and_say_so():
    class Sorting(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4, scale_grad_by_freq=True)
            self.head = nn.Linear(4, 6)

        def forward(self, rows):
            x = self.head(self.table(rows)).sort(-1).values
            return x.clone().view(-1).mul_(2.0).sum()

    model, inputs = Sorting(), {"rows": torch.zeros(4, dtype=torch.long)}
    graph = forward_graph(model, (), inputs)
    by_kind = {op.rpartition("/")[2]: op for op in graph.op_of_node.values()}
    shards = {by_kind["embedding"]: {"m": 2}, by_kind["linear"]: {"m": 2}, by_kind["sum_1"]: {"d.0": 2, "d.1": 4}}
    program = make_program(graph, shards, (2,))
    told = program.report
    assert "no device can do a part" in told[by_kind["embedding"]]
    assert told[by_kind["linear"]] == "cut: m x 2 (axis 0)"
    assert told[by_kind["sort"]].startswith("whole: no rule")
    assert told[by_kind["sum_1"]] == "cut: d x 2 (axis 0); whole along d.1: these inputs have no 4 equal parts of it"
    assert program.home["table.weight"] == whole((8, 4))


def test_parameters_lie_as_their_first_reader_needs_them(graph):
    names = ops(graph)
    shards = {names["up"]: {"n": 2}, names["down"]: {"k": 2}, names["attention.q"]: {"n.1": 2}}
    program = make_program(graph, shards, (2,))
    assert program.home["up.weight"].dims == (((2, 0), (16, WHOLE)), ((16, WHOLE),))
    assert program.home["up.bias"].dims == (((2, 0), (16, WHOLE)),)
    assert program.home["down.weight"].dims == (((16, WHOLE),), ((2, 0), (16, WHOLE)))
    assert program.home["down.bias"] == whole((16,))
    # The second halves of all heads are no shard of a DTensor: stored in two halves, gathered and cut where it is read.
    assert program.home["attention.q.weight"].dims[0] == ((2, 0), (8, WHOLE))


def test_sequence_splits_of_causal_attention_take_their_rows_of_the_mask():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    class Attend(nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v).square().mean()

    graph = forward_graph(Attend(), (), {key: torch.randn(2, 2, 4, 4, requires_grad=True) for key in "qkv"})
    op = next(op for op in graph.op_of_node.values() if "dot_product" in op)
    program = make_program(graph, {op: {"queries": 2}}, (2,))
    step = next(step for step in program.steps if step.way == "cut")
    query, key, _ = (step.demands[position] for position in range(3))
    assert query[0].axes == {0} and not query[1]
    assert not key[0].axes and key[1] == {0}  # read whole; the gradients of all devices add up
