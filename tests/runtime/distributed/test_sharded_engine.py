"""The sharded engine against the plain model, against torch's tensor parallelism, and with plans of PaSE."""

from __future__ import annotations

import dataclasses

import launch
import pytest
import sharded_worker as worker
from equal import build

import rlplace
from benchmarks.papers.pase.batch import data_parallel
from rlplace.runtime.distributed.graph.forward_graph import forward_graph


def problem_of(name, devices=4):
    """A model priced for devices with fast links, so that cutting small ops pays."""
    model, inputs, loss = build(name, double=False)
    graph = rlplace.capture(model, inputs, loss=loss)
    found = rlplace.price(graph, rlplace.Cluster.preset(f"v100:{devices}"), level="op", sharding=True)
    links = dataclasses.replace(found.links, latency_s=found.links.latency_s * 0)
    return dataclasses.replace(found, links=links, sharding=dataclasses.replace(found.sharding, fixed_s=None))


def batch(name, parts):
    return data_parallel(problem_of(name), parts)


def megatron_block():
    """Projections by columns, then by rows."""
    model, inputs = worker.block()
    graph = forward_graph(model, (), inputs, loss=worker.block_loss)
    shards = {}
    for op in graph.op_of_node.values():
        module, _, node = op.rpartition("/")
        if module in ("attention.q", "attention.k", "attention.v"):
            shards[op] = {"n.0": 2}
        elif module == "attention.o":
            shards[op] = {"k.0": 2}
        elif node.startswith("scaled_dot"):
            shards[op] = {"heads": 2}
        elif module == "up":
            shards[op] = {"n": 2}
        elif module == "down":
            shards[op] = {"k": 2}
    assert len(shards) == 7
    return shards


@pytest.mark.slow
def test_two_processes():
    cases = [(name, batch(name, 2)) for name in ("gpt2", "resnet")]
    results = launch.run(2, worker.all_checks, cases, megatron_block())
    first = results[0]
    for result in first["models"]:
        assert result["mesh"] == (2,)
        assert result["cut"] > 20
    for result in results:
        ours, theirs = result["block"]
        assert ours == theirs
        assert sum(ours.values()) == 4  # two all-reduces forward, two backward
    outer = first["loss outside"]
    assert outer["gathers"] == 0
    assert outer["loss_fn"].startswith("cut: m")


def megatron(name):
    """Splits of the layers of a model as tensor parallelism has them, over two devices."""
    problem = problem_of(name)
    rules = {
        "gpt2": {"c_attn": "n.1", "attn.c_proj": "k.0", "c_fc": "n", "mlp.c_proj": "k", "wte": "v", "lm_head": "n"},
        "bert": {
            "query": "n.0", "key": "n.0", "value": "n.0", "attention.output.dense": "k.0", "intermediate.dense": "n",
            "layer.0.output.dense": "k", "word_embeddings": "v", "decoder": "n",
        },
        "llama": {
            "q_proj": "n.0", "k_proj": "n.0", "v_proj": "n.0", "o_proj": "k.0", "gate_proj": "n", "up_proj": "n",
            "down_proj": "k", "embed_tokens": "v", "lm_head": "n",
        },
    }[name]  # fmt: skip
    shards = {}
    for op, dims in problem.sharding.dims.items():
        full = problem.op_names[op]
        module, _, node = full.rpartition("/")
        if op in problem.sharding.follows:
            continue
        for suffix, dim in rules.items():
            if module.endswith(suffix) and dim in dims and dims[dim] % 2 == 0:
                shards[full] = {dim: 2}
        if node.startswith("scaled_dot"):
            shards[full] = {next(d for d in dims if d.startswith("heads")): 2}
        if node.startswith("cross_entropy"):
            shards[full] = {"v": 2}
        if node.startswith("layer_norm") and name == "gpt2":
            shards[full] = {"c": 2}
    assert len(shards) > len(rules)
    return shards


@pytest.mark.slow
def test_layers_cut_by_columns_and_rows():
    cases = [(name, megatron(name)) for name in ("gpt2", "bert", "llama")]
    shares = [result["share"] for result in launch.run(2, worker.models, cases, timeout_s=240)[0]]
    # Parameters themselves are cut; most of this bert is positions, which are not.
    assert shares[0] < 0.6 and shares[1] < 0.85 and shares[2] < 0.55, shares


@pytest.mark.slow
def test_plans_of_pase():
    cases = []
    for name in ("gpt2", "t5", "resnet", "mixtral", "lstm", "swin"):
        plan = rlplace.place(problem_of(name), planner="pase", time_limit_s=None)
        assert plan.shards
        cases.append((name, {op: dict(dims) for op, dims in plan.shards.items()}))
    assert len({tuple(sorted(dims)) for _, shards in cases for dims in shards.values()}) > 5
    cases += [(name, batch(name, 4)) for name in ("awkward", "dlrm")]
    assert all(result["cut"] > 4 for result in launch.run(4, worker.models, cases, timeout_s=540)[0])
