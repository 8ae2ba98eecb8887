import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster import KINDS, Cluster
from rlplace.cost import device_times, explain_times, price, split_backward
from rlplace.cost.calls import calls_of
from rlplace.cost.foreign import shipped_costs
from rlplace.cost.price import kind_times, owners
from rlplace.cost.scaled import context_attention_times
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.graph.coarsen import Grouping, coarsen
from rlplace.model.graph.opgraph import GRADIENT, INPUT
from rlplace.model.zoo import load_model
from rlplace.problem import BACKWARD, FORWARD, UPDATE
from rlplace.simulator.reference import simulate_reference
from tests.graphs import GraphBuilder, random_graph, transformer_graph

ONE, FOUR = Cluster.preset("a100-80g:1"), Cluster.preset("a100-80g:2+t4:2")
graphs = st.builds(random_graph, st.integers(0, 10_000), st.integers(1, 60), tied=st.booleans(), in_place=st.booleans())


def both_levels(graph, cluster, groups):
    return price(graph, cluster, groups=groups), price(graph, cluster, groups=groups, level="op")


def model_bytes(graph):
    held = sum(p.size_bytes + p.gradient_bytes + p.optimizer_bytes for p in graph.parameters)
    read = (graph.tensor_role == INPUT) & (np.diff(graph.consumer_ptr) > 0)
    return held + int(graph.tensor_bytes[read].sum())


@pytest.mark.slow
@settings(max_examples=60)
@given(graphs, st.integers(1, 20))
def test_levels_agree_on_one_device(graph, groups):
    task, op = both_levels(graph, ONE, groups)
    assert task.group_names == op.group_names
    for field in ("resident_bytes", "weight_bytes", "gradient_bytes", "optimizer_bytes", "group_device"):
        assert np.array_equal(getattr(task, field), getattr(op, field))
    assert task.resident_bytes.sum() == model_bytes(graph)
    assert np.array_equal(task.weight_bytes + task.gradient_bytes + task.optimizer_bytes, task.resident_bytes)
    total = device_times(graph, ONE).sum()
    assert task.time_s.sum() == pytest.approx(total, rel=1e-12)
    assert op.time_s.sum() == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(task.group_time_s, op.group_time_s, rtol=1e-9)
    device = [0] * task.num_groups
    by_task, by_op = simulate_reference(task, device), simulate_reference(op, device)
    assert by_task.step_time_s == pytest.approx(by_op.step_time_s, rel=1e-9)
    assert by_task.step_time_s == pytest.approx(total, rel=1e-9)
    # In the order of the tasks, contraction never hides memory.
    grouping = coarsen(graph, groups, cost=device_times(graph, ONE).mean(axis=1))
    key = grouping.op_cluster.astype(int) * 4 + graph.op_phase
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    start = by_task.start_s[rank[number]]
    order = np.lexsort((np.arange(graph.num_ops), rank[number], start)).tolist()
    in_order = simulate_reference(op, device, order=[order])
    assert by_task.peak_memory_bytes[0] >= in_order.peak_memory_bytes[0]


@settings(max_examples=25)
@given(graphs, st.integers(1, 20), st.integers(0, 100))
def test_any_assignment_completes_at_both_levels_and_when_split(graph, groups, seed):
    task, op = both_levels(graph, FOUR, groups)
    device = np.random.default_rng(seed).integers(0, 4, task.num_groups)
    for problem in (task, op):
        assert simulate_reference(problem, device).step_time_s is not None
    split = split_backward(task)
    wide = np.random.default_rng(seed).integers(0, 4, split.num_groups)
    assert simulate_reference(split, wide).step_time_s is not None


def test_normal_groups_have_one_op_per_phase_and_tied_ones_several():
    graph = transformer_graph(4)
    problem = price(graph, ONE, groups=30)
    tied = next(int(g) for g, n in zip(problem.op_group, problem.op_names, strict=True) if "#2" in n.rpartition("/")[2])
    for group in range(problem.num_groups):
        phases = problem.op_phase[problem.op_group == group].tolist()
        if group == tied:
            assert phases.count(FORWARD) == 2 and phases.count(UPDATE) == 1
        else:
            assert len(phases) == len(set(phases))
    assert {"wte", "lm_head"} <= set(problem.group_modules[tied])
    untied = price(transformer_graph(4, tied=False), ONE, groups=30)
    assert not any("#2" in name.rpartition("/")[2] for name in untied.op_names)


def test_a_gradient_for_another_group_keeps_its_bytes():
    builder = GraphBuilder()
    weight = builder.parameter("w", 4096)
    h = builder.op("a", [builder.input(64), weight], 256, kind="gemm", flops=1e6)
    builder.op("b", [h, weight], 256, kind="gemm", flops=1e6)
    graph = builder.build()
    together = price(graph, ONE, groups=2, level="op")
    assert together.num_groups == 1
    grouping = coarsen(graph, 2)
    apart = type(grouping)(
        op_cluster=np.where(graph.op_forward == 1, 1, 0).astype(np.int32),
        cluster_group=np.array([0, 1], dtype=np.int32),
        names=("a", "b"),
        modules=(("a",), ("b",)),
    )
    problem = price(graph, FOUR, groups=apart, level="op")
    sizes = {}
    for tensor in range(problem.num_tensors):
        source, owner = int(problem.tensor_producer[tensor]), int(problem.tensor_owner[tensor])
        for consumer in problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]].tolist():
            name = problem.op_names[source] if source >= 0 else f"owner {problem.group_names[owner]}"
            sizes[name, problem.op_names[consumer]] = int(problem.tensor_bytes[tensor])
    assert sizes["b/op_1.backward", "w/update"] == 4096
    assert sizes["a/op_0.backward", "w/update"] == 0
    assert sizes["owner a", "b/op_1"] == 4096
    assert problem.resident_bytes.tolist() == [4 * 4096 + 64, 0]


def test_saved_activations_go_from_forward_to_backward_once():
    graph = transformer_graph(3)
    problem = price(graph, ONE, groups=25)
    producer = problem.tensor_producer[problem.edge_tensor]
    crossing = (problem.op_phase[producer] == FORWARD) & (problem.op_phase[problem.consumers] == BACKWARD)
    assert problem.tensor_bytes[problem.edge_tensor[crossing]].sum() > 0
    # No two tensors have the same producer and the same consumers.
    rows = [
        (int(problem.tensor_producer[t]), int(problem.tensor_owner[t]), tuple(problem.consumers[a:b].tolist()))
        for t, (a, b) in enumerate(zip(problem.consumer_ptr[:-1], problem.consumer_ptr[1:], strict=True))
    ]
    assert len(set(rows)) == len(rows)
    # Nothing is counted twice: what crosses is at most what the graph makes.
    made = (graph.tensor_producer >= 0) & (graph.tensor_role != GRADIENT)
    assert problem.tensor_bytes[problem.tensor_producer >= 0].sum() <= graph.tensor_bytes[made].sum()


def test_views_do_not_keep_storages_alive():
    builder = GraphBuilder()
    h = builder.op("a", [builder.input(64)], 1 << 20)
    builder.op("a", [h], 0, kind="view")
    g = builder.op("b", [h], 1 << 10)
    for _ in range(3):
        g = builder.op("c", [g], 1 << 10)
    problem = price(builder.build(), ONE, level="op")
    order = [op for op in range(problem.num_ops) if op != 1] + [1]
    late = simulate_reference(problem, [0] * problem.num_groups, order=[order])
    assert late.peak_memory_bytes[0] == ONE.devices[0].reserved_bytes + 64 + (1 << 20) + (1 << 10)


def by_module(graph, names):
    """Makes a grouping with a group for each of these modules; an update goes to the last."""
    number = {name: group for group, name in enumerate(names)}
    cluster = [number[graph.op_module[op]] if op >= 0 else len(names) - 1 for op in graph.op_forward.tolist()]
    cluster = np.where(graph.op_phase == UPDATE, len(names) - 1, cluster).astype(np.int32)
    return Grouping(cluster, np.arange(len(names), dtype=np.int32), tuple(names), tuple((name,) for name in names))


def test_what_is_trained_lives_with_its_update_and_what_is_not_with_its_first_reader():
    """Module b, group 0, reads after module a, group 1; updates are in group 2."""
    builder = GraphBuilder()
    weight, table = builder.parameter("w", 4096), builder.parameter("t", 64, is_buffer=True)
    source = builder.input(128)
    h = builder.op("a", [source, weight, table], 256, saved=False)
    builder.op("b", [h, weight, table, source], 256, saved=False)
    builder.op("c", [builder.op("c", [h], 8)], 8)
    graph = builder.build()
    grouping = by_module(graph, ("b", "a", "c"))
    of_parameter, of_tensor = owners(graph, grouping)
    assert of_parameter.tolist() == [2, 1]
    assert (of_tensor[weight], of_tensor[table], of_tensor[source], of_tensor[h]) == (2, 1, 1, -1)
    assert price(graph, FOUR, groups=grouping).weight_bytes.tolist() == [0, 64 + 128, 4096]


def test_what_leaves_a_task_is_there_until_its_end():
    """The first op's 1000 bytes are read inside and outside: at the last op they stand beside 10 + 20 and 500 for a moment."""
    builder = GraphBuilder()
    h = builder.op("a", [builder.input(64)], 1000)
    small = builder.op("a", [h], 10)
    end = builder.op("a", [small], 20, temporary_bytes=500)
    builder.op("b", [h, end], 30)
    graph = builder.build()
    problem = price(graph, ONE, groups=by_module(graph, ("a", "b")))
    assert dict(zip(problem.op_names, problem.temporary_bytes.tolist(), strict=True)) == {
        "a/forward": 510,
        "b/forward": 30,  # which nothing reads
    }


def test_causal_attention_computes_the_tiles_up_to_the_diagonal():
    builder = GraphBuilder()
    builder.op("a", [builder.input(64)], 64, kind="attention", flops=1e9)
    graph = builder.build()
    for tiles in (1, 2, 8, 31):
        keys = 128 * tiles
        marked = dataclasses.replace(graph, op_dims={0: {"causal": 1, "heads": 1, "queries": keys, "keys": keys, "width": 1}})
        assert calls_of(marked).flops.sum() == pytest.approx(1e9 * np.tril(np.ones((tiles, tiles))).mean())


def test_source_and_group_contents():
    graph = random_graph(2, 30)
    problem = price(graph, FOUR, groups=9)
    assert problem.source["cluster"] == "a100-80g:2+t4:2"
    assert problem.source["graph_fingerprint"] == graph.fingerprint
    assert problem.source["cluster_fingerprint"] == FOUR.fingerprint
    assert problem.source["groups"] == 9 and problem.source["level"] == "task"
    assert problem.samples_per_microbatch == graph.samples
    names = [name for group in problem.group_ops for name in group]
    assert sorted(names) == sorted(n for n, p in zip(graph.op_names, graph.op_phase, strict=True) if p == FORWARD)
    assert all(problem.group_modules)
    assert price(graph, FOUR, groups=9).fingerprint == problem.fingerprint


def test_kinds_are_priced_apart():
    problem = price(transformer_graph(2), FOUR, groups=20)
    assert np.array_equal(problem.time_s[:, 0], problem.time_s[:, 1])
    assert (problem.time_s[:, 2] >= problem.time_s[:, 0]).all()
    assert problem.time_s[:, 2].sum() > 2.9 * problem.time_s[:, 0].sum()


def test_split_backward():
    problem = price(transformer_graph(3), FOUR, groups=20)
    split = split_backward(problem)
    assert split.num_ops == problem.num_ops
    assert split.resident_bytes.sum() == problem.resident_bytes.sum()
    backward = [i for i, name in enumerate(split.group_names) if name.endswith(".backward")]
    for group in backward:
        assert split.group_names[group - 1] + ".backward" == split.group_names[group]
        assert split.resident_bytes[group - 1] == 0
        assert (split.op_phase[split.op_group == group] != FORWARD).all()
        assert (split.op_phase[split.op_group == group - 1] == FORWARD).all()
        read = split.tensor_bytes[(split.tensor_owner == group)]
        assert split.weight_bytes[group] == 0 or split.weight_bytes[group] in read.tolist()
    one = split_backward(price(transformer_graph(3), ONE, groups=20))
    whole = price(transformer_graph(3), ONE, groups=20)
    a = simulate_reference(one, [0] * one.num_groups)
    b = simulate_reference(whole, [0] * whole.num_groups)
    assert a.step_time_s == b.step_time_s
    assert np.array_equal(a.peak_memory_bytes, b.peak_memory_bytes)
    device = np.zeros(split.num_groups, dtype=int)
    device[backward] = 1
    assert simulate_reference(split, device).step_time_s > simulate_reference(split, device * 0).step_time_s
    assert split_backward(split).group_names == split.group_names


def test_split_refuses_a_name_that_is_taken():
    from rlplace.problem import problem_from_dict, problem_to_dict

    data = problem_to_dict(price(transformer_graph(1), FOUR, groups=5))
    data["groups"][1]["name"] = data["groups"][0]["name"] + ".backward"
    with pytest.raises(InputError, match="exists already"):
        split_backward(problem_from_dict(data))


def test_split_without_parts_counts_all_as_weights():
    from rlplace.problem import problem_from_dict, problem_to_dict

    data = problem_to_dict(price(transformer_graph(1), FOUR, groups=5))
    for group in data["groups"]:
        for key in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            del group[key]
    problem = problem_from_dict(data)
    split = split_backward(problem)
    owned = split.tensor_bytes[split.tensor_owner >= 0]
    assert set(problem.resident_bytes[problem.resident_bytes > 0].tolist()) <= set(owned.tolist())


def test_bad_arguments():
    graph = random_graph(0, 10)
    with pytest.raises(InputError, match="did you mean 'task'"):
        price(graph, ONE, level="tasks")
    with pytest.raises(InputError, match="target must be a whole number from 1 up, found 0"):
        price(graph, ONE, groups=0)
    with pytest.raises(InputError, match="grouping is for"):
        price(graph, ONE, groups=coarsen(random_graph(0, 11), 5))


def test_attention_under_a_mask_of_positions_is_priced_as_causal():
    model = load_model("hf:gpt2,n_layer=1,n_embd=64,n_head=2,vocab_size=512", batch=2, seq=512)
    plain = capture(model.module, model.example_inputs)
    assert [plain.op_dims[op]["causal"] for op, kind in enumerate(plain.op_kind) if kind == "attention"] == [1, 1]
    padded = {**model.example_inputs, "attention_mask": torch.ones(2, 512, dtype=torch.int64, device="meta")}
    graph = capture(model.module, padded)
    op = next(op for op, kind in enumerate(graph.op_kind) if kind == "attention")
    assert "causal" not in graph.op_dims[op]  # there is a mask in its place
    wide = dataclasses.replace(graph, op_flops=np.where(np.arange(graph.num_ops) == op, 1e12, graph.op_flops))
    times = kind_times(wide, Cluster.preset("a100-80g:2"), shipped_costs())["a100-80g"]
    full = explain_times(wide, KINDS["a100-80g"])
    assert times.device_s[op] < 0.65 * full.device_s[op]
    others = np.delete(np.arange(graph.num_ops), op)
    assert (times.device_s[others] <= full.device_s[others]).all()


def test_attention_of_unlike_widths_takes_the_kernel_that_torch_runs():
    def seconds(kind, query, value, dtype="bfloat16"):
        builder = GraphBuilder()
        builder.op("a", [builder.input(64)], 64, kind="attention", flops=1e12)
        sizes = {"batch": 1, "heads": 128, "queries": 4096, "keys": 4096, "width": query}
        dims = {0: sizes | ({} if query == value else {"value_width": value})}
        built = builder.build()
        graph = dataclasses.replace(built, op_dims=dims, op_dtype=(dtype,) * built.num_ops)
        return explain_times(graph, KINDS[kind]).device_s[0]

    a100 = seconds("a100-80g", 128, 128)
    assert seconds("a100-80g", 192, 128) == pytest.approx(2.1 * a100, rel=0.05)  # the memory-efficient one of CUTLASS
    assert seconds("h100", 192, 128) == seconds("h100", 96, 64) == seconds("h100", 128, 128)  # cuDNN
    assert seconds("h100", 256, 128) == pytest.approx(2.1 * 1.62 * seconds("h100", 128, 128), rel=0.05)
    for kind, dtype in (("a100-80g", "float32"), ("v100", "float16"), ("mi300x", "bfloat16")):  # one kernel for all widths
        assert seconds(kind, 192, 128, dtype) == seconds(kind, 128, 128, dtype)


def test_attention_of_context_groups_takes_the_kernels_that_run_there():
    def times(kind, ring, backward=False, dtype="bfloat16", **dims):
        return context_attention_times(KINDS[kind], dtype, {"causal": 1, **dims}, ring=ring, backward=backward)

    wide = {"width": 192, "value_width": 128}
    assert times("h100", True, width=128) == times("h100", False, width=128) == 1.62  # FlashAttention-2 for cuDNN
    assert times("a100-80g", True, width=128) == times("h100", True, dtype="float32", width=128) == 1.0
    assert times("h100", False, causal=0, width=128) == 1.0 and times("h100", True, causal=0, width=128) == 1.62
    # Values padded to 192: 384 columns for 320 forwards, 960 for 832 backwards; without a context group the kernel takes 2.1.
    assert times("h100", True, **wide) == pytest.approx(1.62 * 384 / 320)
    assert times("h100", True, True, **wide) == pytest.approx(1.62 * 960 / 832)
    assert times("a100-80g", True, **wide) == pytest.approx(384 / 320 / 2.1)
    assert times("h100", False, **wide) == pytest.approx(1.62 * 2.1) and times("a100-80g", False, **wide) == pytest.approx(1.0)
