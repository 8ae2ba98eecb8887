"""Backward ops split into input and weight gradients: same work, right parts, acyclic at every granularity."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlplace.cluster import Cluster
from rlplace.cost import device_times
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.capture.weight_gradients import part_times, split_weight_gradients
from rlplace.model.graph.opgraph import BACKWARD, BACKWARD_WEIGHT, FORWARD, GRADIENT, UPDATE, OpGraph
from tests.captured import graph_of
from tests.graphs import GraphBuilder, random_graph, transformer_graph

ONE, FOUR = Cluster.preset("a100-80g:1"), Cluster.preset("a100-80g:2+t4:2")
graphs = st.builds(random_graph, st.integers(0, 10_000), st.integers(1, 50), tied=st.booleans(), in_place=st.booleans())


def check_split(graph, split, origin):
    assert split.op_flops.sum() == pytest.approx(graph.op_flops.sum(), rel=1e-12)
    for field in ("op_flops", "op_bytes"):  # part by part as well
        total = np.zeros(graph.num_ops)
        np.add.at(total, origin, getattr(split, field))
        np.testing.assert_allclose(total, getattr(graph, field), rtol=1e-12)
    assert (split.op_flops >= 0).all() and (split.op_bytes >= 0).all()
    phase, producer = split.op_phase[split.consumers], split.tensor_producer[split.edge_tensor]
    from_weight = (producer >= 0) & (split.op_phase[np.maximum(producer, 0)] == BACKWARD_WEIGHT)
    assert set(phase[from_weight].tolist()) <= {BACKWARD_WEIGHT, UPDATE}  # nothing that passes gradients on waits for weights
    for name in ("parameters", "samples", "name"):
        assert getattr(split, name) == getattr(graph, name)
    twins = np.flatnonzero(np.diff(origin) == 0)
    assert (split.op_phase[twins] == BACKWARD).all() and (split.op_phase[twins + 1] == BACKWARD_WEIGHT).all()
    assert len(twins) == split.num_ops - graph.num_ops

    # Every edge of the graph is still there, and every new one leads to the second part of a split op.
    def edges(g, op):
        return {(int(t), int(op[c])) for t, c in zip(g.edge_tensor, g.consumers, strict=True)}

    after = edges(split, origin)
    before = edges(graph, np.arange(graph.num_ops))
    assert {e for e in after if e[0] < graph.num_tensors} == before


@settings(max_examples=80)
@given(graphs)
def test_random_graphs_keep_their_work_and_times(graph):
    split, origin = split_weight_gradients(graph)
    check_split(graph, split, origin)
    whole_s = device_times(graph, FOUR)
    total_s = np.zeros_like(whole_s)
    np.add.at(total_s, origin, part_times(whole_s, device_times(split, FOUR), origin))
    np.testing.assert_allclose(total_s, whole_s, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm", "t5"])
def test_models(name):
    graph = graph_of(name)
    split, origin = split_weight_gradients(graph)
    check_split(graph, split, origin)
    backward, weight = split.op_phase == BACKWARD, split.op_phase == BACKWARD_WEIGHT
    made = split.tensor_producer[split.tensor_role == GRADIENT]
    assert weight[made].all()  # every parameter gets its gradient from a weight-gradient op
    kinds = np.array(split.op_kind)[np.maximum(split.op_forward, 0)]
    products = np.isin(kinds, ["gemm", "conv", "bmm", "recurrent"])
    forward = split.op_flops[(split.op_phase == FORWARD) & products].sum()
    assert split.op_flops[weight & products].sum() == pytest.approx(forward, rel=0.02)  # biases; the first layer has no dX
    assert split.op_flops[backward & products].sum() <= forward


def linear(batch=4, inputs=8, outputs=16):
    net = nn.Sequential(nn.Linear(inputs, inputs), nn.Linear(inputs, outputs))
    return capture(net, torch.empty(batch, inputs), loss=torch.sum)


def named(graph, name):
    return graph.op_names.index(name)


def test_a_linear_layer_splits_into_its_two_products():
    graph = linear()
    split = split_weight_gradients(graph)[0]
    first, second = named(split, "1/linear_1.backward"), named(split, "1/linear_1.backward_weight")
    assert split.op_flops[first] == 2 * 4 * 8 * 16  # dX = dY W
    assert split.op_flops[second] == 2 * 4 * 8 * 16 + 4 * 16  # dW = X^T dY, and the bias
    reads = {op: {int(t) for t, c in zip(split.edge_tensor, split.consumers, strict=True) if c == op} for op in (first, second)}
    weight = next(t for t in range(split.num_tensors) if split.tensor_bytes[t] == 4 * 8 * 16 and split.tensor_producer[t] < 0)
    saved = next(
        t for t in range(split.num_tensors) if split.tensor_producer[t] == named(split, "0/linear") and split.tensor_bytes[t]
    )
    assert weight in reads[first] and weight not in reads[second]
    assert saved in reads[second] and saved not in reads[first]
    # dX reads dY and W and writes dX; dW reads dY and X and writes dW and db: bytes in that proportion.
    gradient = sum(int(split.tensor_bytes[t]) for t in reads[first] if t != weight)
    ratio = (gradient + 4 * 8 * 16 + 4 * 4 * 8) / (gradient + 4 * 4 * 8 + 4 * 8 * 16 + 4 * 16)
    assert split.op_bytes[first] / split.op_bytes[second] == pytest.approx(ratio, rel=0.01)
    # The first layer has no gradient to pass on: all of it is weight gradient.
    assert "0/linear.backward" not in split.op_names
    only = named(split, "0/linear.backward_weight")
    assert split.op_phase[only] == BACKWARD_WEIGHT
    assert split.op_flops[only] == graph.op_flops[named(graph, "0/linear.backward")]


def test_what_is_computed_from_parameters_alone_goes_with_the_weights():
    """Position tables are read at fixed positions: no op waits for their gradient and the sum over the batch before it."""
    split = split_weight_gradients(graph_of("gpt2"))[0]
    tables = [i for i, name in enumerate(split.op_names) if "wpe" in name and ".backward" in name]
    assert tables and all(split.op_phase[i] == BACKWARD_WEIGHT for i in tables)


def test_attention_stays_whole():
    split = split_weight_gradients(graph_of("t5"))[0]  # its position bias is a parameter
    kinds = {split.op_kind[i] for i in np.flatnonzero(split.op_phase == BACKWARD_WEIGHT)}
    assert "attention" not in kinds and "gemm" in kinds


def test_ops_that_others_wait_for_stay_whole():
    builder = GraphBuilder()
    weight = builder.parameter("w", 4096)
    h = builder.op("a", [builder.input(64), weight], 256, kind="gemm", flops=1e6)
    builder.op("b", [h, builder.parameter("v", 4096)], 256, kind="gemm", flops=1e6)
    graph = builder.build()
    assert (split_weight_gradients(graph)[0].op_phase == BACKWARD_WEIGHT).sum() == 2
    op = graph.op_names.index("b/op_1.backward")
    waits = graph.op_names.index("a/op_0.backward")
    rows = [
        (int(r), int(p), int(m), int(b), graph.consumers[s:e].tolist())
        for r, p, m, b, s, e in zip(
            graph.tensor_role, graph.tensor_parameter, graph.tensor_producer, graph.tensor_bytes,
            graph.consumer_ptr[:-1], graph.consumer_ptr[1:], strict=True,
        )
    ] + [(0, -1, op, 0, [waits])]  # fmt: skip
    from dataclasses import replace

    ordered = replace(
        graph,
        tensor_role=np.array([r[0] for r in rows], dtype=np.int8),
        tensor_parameter=np.array([r[1] for r in rows], dtype=np.int32),
        tensor_producer=np.array([r[2] for r in rows], dtype=np.int32),
        tensor_bytes=np.array([r[3] for r in rows], dtype=np.int64),
        consumer_ptr=np.concatenate([[0], np.cumsum([len(r[4]) for r in rows])]).astype(np.int64),
        consumers=np.array([c for r in rows for c in r[4]], dtype=np.int32),
    )
    split = split_weight_gradients(ordered)[0]
    assert "b/op_1.backward_weight" not in split.op_names
    assert split.op_phase[split.op_names.index("b/op_1.backward")] == BACKWARD


def test_twice_is_refused():
    split = split_weight_gradients(transformer_graph(1))[0]
    with pytest.raises(InputError, match="already"):
        split_weight_gradients(split)


def test_a_split_graph_survives_its_file(tmp_path):
    split = split_weight_gradients(graph_of("gpt2"))[0]
    split.save(tmp_path / "g.graph.json")
    again = OpGraph.load(tmp_path / "g.graph.json")
    assert again.fingerprint == split.fingerprint


def test_part_times_add_up_where_nothing_is_priced():
    whole = np.array([[2.0, np.nan], [0.0, 0.0], [5.0, 5.0]])
    parts = np.array([[1.0, np.nan], [3.0, np.nan], [0.0, 0.0], [0.0, 0.0], [9.0, 9.0]])
    result = part_times(whole, parts, np.array([0, 0, 1, 1, 2]))
    np.testing.assert_array_equal(result, [[0.5, np.nan], [1.5, np.nan], [0, 0], [0, 0], [5, 5]])


def test_times_follow_the_cost_model():
    graph = linear(batch=4096, inputs=2048, outputs=2048)
    split, origin = split_weight_gradients(graph)
    seconds = part_times(device_times(graph, ONE), device_times(split, ONE), origin)
    first, second = named(split, "1/linear_1.backward"), named(split, "1/linear_1.backward_weight")
    assert seconds[first, 0] == pytest.approx(seconds[second, 0], rel=0.05)
