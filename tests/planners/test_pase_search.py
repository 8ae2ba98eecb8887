"""The search of PaSE against brute force, and its plans of captured models."""

import dataclasses
import itertools
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import pipeline_chain

from benchmarks.papers.pase.baselines import strategy_cost
from benchmarks.papers.pase.batch import batch_dims, data_parallel
from benchmarks.papers.pase.kinds import contiguous, gemm
from rlplace.cost.price import price
from rlplace.errors import InfeasibleError, InputError
from rlplace.graph.capture import capture
from rlplace.plan import make_plan
from rlplace.planners import run_planner
from rlplace.planners.pase import dp
from rlplace.planners.pase.captured import layer_graph, machine_of, shards_of
from rlplace.planners.pase.costs import CostTables, configurations, cost_tables
from rlplace.planners.pase.dp import dependent_sets, least_cost_strategy, min_degree
from rlplace.planners.pase.layers import AllReduce, Dim, Layer, LayerEdge, LayerGraph, Machine
from rlplace.planners.pase.pase import pase
from rlplace.problem import FORWARD, Device
from rlplace.simulator import simulate
from rlplace.zoo import load_model

MACHINE = Machine()


def brute_force(graph: LayerGraph, tables: CostTables) -> float:
    """Cheapest of all combinations, each of them added up."""
    count = len(graph.layers)
    axes = np.ix_(*(range(len(rows)) for rows in tables.configurations))
    total = np.zeros([len(rows) for rows in tables.configurations])
    for vertex in range(count):
        total = total + tables.layer_flop[vertex][axes[vertex]]
    for edge, cost in zip(graph.edges, tables.edge_flop, strict=True):
        total = total + cost[axes[edge.source], axes[edge.target]]
    return float(total.min())


@st.composite
def random_case(draw: st.DrawFn) -> tuple[LayerGraph, CostTables, tuple[int, ...]]:
    """A random DAG, a random cost for everything, and a random order."""
    count = draw(st.integers(1, 7))
    pairs = [pair for pair in itertools.combinations(range(count), 2) if draw(st.booleans())]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    options = [int(k) for k in rng.integers(1, 6, count)]
    layers = tuple(Layer(f"v{i}", "any", (Dim("b", 1),)) for i in range(count))
    edges = tuple(LayerEdge(u, v, (1,), (("b",),), (("b",),)) for u, v in pairs)
    # Whole numbers up to 8 make ties frequent and sums exact.
    tables = CostTables(
        [np.ones((k, 1), dtype=np.int64) for k in options],
        [rng.integers(0, 8, k).astype(float) for k in options],
        [rng.integers(0, 8, (options[u], options[v])).astype(float) for u, v in pairs],
    )
    return LayerGraph("random", layers, edges), tables, tuple(draw(st.permutations(range(count))))


@given(random_case())
@settings(max_examples=120)
def test_search_equals_brute_force_in_any_order(case: tuple[LayerGraph, CostTables, tuple[int, ...]]) -> None:
    graph, tables, order = case
    best = brute_force(graph, tables)
    for sequence in (min_degree(graph), order):
        chosen = dp.eliminate(graph, tables, sequence, dependent_sets(graph, sequence))
        assert tables.total(graph, chosen) == best


@given(random_case())
@settings(max_examples=40)
def test_pieces_give_the_same_choice(case: tuple[LayerGraph, CostTables, tuple[int, ...]]) -> None:
    graph, tables, order = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dp, "MAX_SUM_BYTES", 64)
        chosen = dp.eliminate(graph, tables, order, dependent_sets(graph, order))
    assert tables.total(graph, chosen) == brute_force(graph, tables)


def matmuls(widths: list[int]) -> LayerGraph:
    """A chain of products with its shortcut from the first to the last."""
    layers = tuple(
        Layer(f"fc{i}", "gemm", (Dim("b", 8), Dim("n", n), Dim("k", k)), gemm("b", "n", "k"))
        for i, (k, n) in enumerate(itertools.pairwise(widths))
    )
    out, read = (("b",), ("n",)), (("b",), ("k",))
    chain = [LayerEdge(i, i + 1, (8, widths[i + 1]), out, read) for i in range(len(layers) - 1)]
    return LayerGraph("chain", layers, (*chain, LayerEdge(0, len(layers) - 1, (8, widths[1]), out, read)))


def test_real_costs_brute_force() -> None:
    graph = matmuls([64, 512, 512, 512])
    tables = cost_tables(graph, 4, MACHINE)
    found = dp.least_cost_strategy(graph, 4, machine=MACHINE)
    assert found.cost_flop == pytest.approx(brute_force(graph, tables), rel=1e-12)
    assert found.cost_flop == pytest.approx(strategy_cost(graph, found.configurations, MACHINE), rel=1e-12)
    assert all(prod(row) <= 4 for row in found.configurations)
    cuts = zip(graph.layers[0].dims, found.configurations[0], strict=True)
    assert found.parts["fc0"] == {dim.name: parts for dim, parts in cuts if parts > 1}


def test_more_devices_never_cost_more() -> None:
    graph = matmuls([64, 1024, 1024, 1024])
    costs = [dp.least_cost_strategy(graph, p).cost_flop for p in (1, 2, 3, 4, 8, 16)]
    assert costs == sorted(costs, reverse=True)
    assert dp.least_cost_strategy(graph, 1).configurations == ((1, 1, 1),) * 3


def test_a_slow_link_makes_splitting_dear() -> None:
    graph = matmuls([512, 512, 512, 512])
    fast = dp.least_cost_strategy(graph, 8, machine=Machine(bandwidth_bytes_per_s=1e15))
    slow = dp.least_cost_strategy(graph, 8, machine=Machine(bandwidth_bytes_per_s=1e3))
    assert all(prod(row) == 8 for row in fast.configurations)
    assert all(prod(row) == 1 for row in slow.configurations)


def test_configurations() -> None:
    layer = Layer("x", "any", (Dim("a", 12), Dim("h", 12, splittable=False), Dim("c", 6)))
    rows = {tuple(row) for row in configurations(layer, 6).tolist()}
    assert rows == {(a, 1, c) for a in (1, 2, 3, 4, 6) for c in (1, 2, 3, 6) if a * c <= 6}
    assert {tuple(row) for row in configurations(layer, 6, 4).tolist()} == {(1, 1, 1), (2, 1, 1), (3, 1, 1)}
    flat = Layer("x", "reshape", (Dim("a", 2), Dim("b", 4), Dim("c", 4)), allows=contiguous)
    assert configurations(flat, 8).tolist() == [[1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 4, 1]]


def test_refusals() -> None:
    graph = matmuls([64, 64, 64])
    with pytest.raises(InputError, match="at least 1"):
        dp.least_cost_strategy(graph, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dp, "MAX_TABLES_BYTES", 8)
        with pytest.raises(InputError, match="bytes of tables"):
            dp.least_cost_strategy(graph, 4)


GPT2 = "hf:gpt2,n_layer=2,n_embd=256,n_head=4,vocab_size=4096,n_positions=64"
MODELS = {
    GPT2: (8, 64),
    "hf:bert,num_hidden_layers=2,hidden_size=64,intermediate_size=128,num_attention_heads=4": (8, 32),
    "hf:t5,num_layers=1,d_model=64,d_kv=16,num_heads=4,d_ff=128": (8, 32),
    "hf:resnet,depths=1/1/1/1": (8, 32),
    "zoo:inception": (8, 32),
    "zoo:lstm": (8, 32),
}


def captured(spec, cluster="a100-80g:4", batch=8, seq=64):
    model = load_model(spec, batch=batch, seq=seq)
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    return price(graph, cluster, level="op", sharding=True)


@pytest.fixture(scope="module")
def gpt():
    return captured(GPT2)


@pytest.fixture(scope="module")
def classifier():
    """The fully connected half of AlexNet: weights that are much larger than what passes through."""
    layers = nn.Sequential(nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    graph = capture(layers, (torch.randn(128, 9216, device="meta"),), loss=lambda out: out.square().mean())
    return price(graph, "v100:4,pcie", level="op", sharding=True)


def step_s(problem, shards):
    plan = make_plan(problem, np.zeros(problem.num_groups, dtype=np.int32), planner="hand", shards=shards)
    line = simulate(problem, plan)
    assert line.feasible
    return line.step_time_s


@pytest.mark.parametrize("spec", [pytest.param(m, marks=[pytest.mark.slow] * (m == "zoo:inception")) for m in MODELS])
def test_nearly_all_time_can_be_cut_along_the_batch(spec):
    batch, seq = MODELS[spec]
    problem = captured(spec, batch=batch, seq=seq)
    forward = np.flatnonzero(problem.op_phase == FORWARD)
    found = batch_dims(problem)
    heavy = {"gemm", "bmm", "conv", "attention", "recurrent", "norm", "softmax"}
    assert {problem.op_kind[op] for op in found} & {"gemm", "conv"}
    assert {problem.op_names[op] for op in forward.tolist() if problem.op_kind[op] in heavy and op not in found} == set()
    for op in found:
        assert problem.sharding.dims[op][found[op]] % batch == 0 or found[op].endswith(".0")
    graph = layer_graph(problem)
    ops = [op for layer in graph.layers for op in layer.ops]
    assert len(ops) == len(set(ops))
    timed = {problem.op_names[op] for op in forward.tolist() if problem.time_s[op, 0] > 0}
    assert timed <= set(ops)


def test_layers_of_a_transformer(gpt):
    graph = layer_graph(gpt)
    kinds = [layer.kind for layer in graph.layers]
    assert kinds.count("attention") == 2 and kinds.count("embedding") == 2
    assert kinds.count("gemm") == 9  # four products a block, and the head
    mlp = next(layer for layer in graph.layers if layer.name == "transformer.h.0.mlp.c_fc/addmm_2")
    assert {dim.name.partition(".")[0] for dim in mlp.dims} == {"m", "n", "k"}
    assert prod(mlp.sizes()) == 8 * 64 * 256 * 1024
    sums = [term for term in mlp.terms if isinstance(term, AllReduce)]
    assert {tuple(sorted({name[0] for name in term.over})) for term in sums} == {("k",), ("n",), ("m",)}


def test_all_reduces_carry_the_bytes_of_partial_sums_and_gradients(classifier):
    layer = layer_graph(classifier).layers[0]
    bytes_of = {term.over: 4 * term.factor * prod(dim.size for dim in layer.dims if dim.name in term.dims)
                for term in layer.terms if isinstance(term, AllReduce) and len(term.dims) == 2}  # fmt: skip
    assert bytes_of == {("k",): 4.0 * 128 * 4096, ("m",): 4.0 * 4096 * 9216}  # the input needs no gradient


def test_the_cost_of_one_device_is_the_time_of_the_step(classifier):
    graph = layer_graph(classifier, 1)
    whole = tuple((1,) * len(layer.dims) for layer in graph.layers)
    seconds = strategy_cost(graph, whole, machine_of(classifier, 1)) / 1e12
    assert seconds == pytest.approx(classifier.time_s[:, 0].sum(), rel=1e-9)


def test_published_strategy_for_large_layers(classifier):
    """Products alternate between output and input channels, so that only sums travel; no layer is cut along the batch alone."""
    graph = layer_graph(classifier, 4)
    strategy = least_cost_strategy(graph, 4, machine=machine_of(classifier, 4))
    first, second, third = (strategy.parts[f"{index}/linear{suffix}"] for index, suffix in ((0, ""), (2, "_1"), (4, "_2")))
    assert all(parts.get("m", 1) < 4 for parts in (first, second, third))
    assert first.get("n", 1) == second.get("k", 1) and second.get("n", 1) == third.get("k", 1)
    shards = shards_of(classifier, strategy)
    assert step_s(classifier, shards) < 0.5 * step_s(classifier, data_parallel(classifier, 4))


@pytest.mark.parametrize("problem", ["gpt", "classifier"])
def test_the_plan_is_not_slower_than_cutting_the_batch_alone(problem, request):
    problem = request.getfixturevalue(problem)
    run = run_planner("pase", problem)
    plan = run.plan
    assert plan.planner == "pase" and plan.shards and (plan.device_of_group == 0).all()
    assert plan.predicted.feasible and run.simulator_calls >= 3
    assert plan.predicted.step_time_s == simulate(problem, plan).step_time_s
    assert plan.predicted.step_time_s <= step_s(problem, data_parallel(problem, 4)) * (1 + 1e-9)
    assert plan.predicted.step_time_s <= step_s(problem, None)


def test_same_seed_same_plan_and_the_problem_stays(gpt):
    before = gpt.fingerprint
    first, second = pase(gpt, seed=3), pase(gpt, seed=3)
    assert first.to_dict() == second.to_dict() and first.seed == 3
    assert gpt.fingerprint == before


def with_memory(problem, size_bytes):
    devices = tuple(Device(d.name, size_bytes + d.reserved_bytes, d.reserved_bytes, d.kind) for d in problem.devices)
    return dataclasses.replace(problem, devices=devices)


def test_memory_decides_where_it_is_short(classifier):
    """Weights, gradients and Adam's state take 16 bytes a parameter: a whole copy does not fit, cut weights do."""
    copy = int(classifier.resident_bytes.sum())
    short = with_memory(classifier, copy // 2)
    plan = pase(short)
    assert plan.predicted.feasible
    assert max(plan.predicted.peak_memory_bytes) <= copy // 2 + short.devices[0].reserved_bytes
    with pytest.raises(InfeasibleError, match=r"bytes|GB|MB"):
        pase(with_memory(classifier, copy // 8))


def test_a_price_on_memory_cuts_weights(gpt):
    def largest(price):
        graph = layer_graph(gpt, 4, gradient_price=0.0, memory_price=price)
        plan = make_plan(gpt, np.zeros(gpt.num_groups, dtype=np.int32), planner="hand",
                         shards=shards_of(gpt, least_cost_strategy(graph, 4, machine=machine_of(gpt, 4))))  # fmt: skip
        return max(simulate(gpt, plan).peak_memory_bytes)

    assert largest(1e-9) < largest(0.0)


def test_what_cannot_be_cut_is_refused(gpt):
    with pytest.raises(InputError, match=r"does not say along which dimensions its ops can be cut"):
        pase(pipeline_chain(4, 2))
    with pytest.raises(InputError, match="micro-batches"):
        pase(gpt, microbatches=2)
    fixed = dataclasses.replace(gpt, group_device=np.zeros(gpt.num_groups, dtype=np.int32))
    with pytest.raises(InputError, match="fixed groups"):
        pase(fixed)
