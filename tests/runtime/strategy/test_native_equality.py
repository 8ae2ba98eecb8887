"""Strategies on four processes give the loss, the gradients and the trained parameters of the plain model.

A case is a model and a strategy, in double precision; the quick ones run in one launch, the others in another. They are
strategies that the matrix has not, under foreach and fused optimizers. `test_native_matrix` runs cells of the matrix.
"""

from functools import cache

import pytest
import torch

from rlplace.runtime.strategy.why_not import minor_version
from tests.runtime.strategy import native_worker
from tests.runtime.strategy.native_cases import GPT2, beside, chain, flat, stage

pytest.importorskip("transformers")

HALVES, QUARTERS = [(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)]
SHARED, COPIES = {"mesh": {"shard": 2}, "sharding": 1}, {"mesh": {"replicate": 2}, "sharding": 0}
ALONE = {"mesh": {}, "sharding": 0}
THIRDS = [((0,), {}), ((1, 2), {"tensor": 2}), ((3,), {})]
ENDS_ALONE = [
    stage(blocks, devices, mesh, 0)
    for blocks, (devices, mesh) in zip(
        [GPT2[:2], *([block] for block in GPT2[2:6]), GPT2[6:]], [*THIRDS, *reversed(THIRDS)], strict=True
    )
]
LOOP, TURN = HALVES * 2, [*HALVES, *reversed(HALVES)]

PAIR, NARROW = [{"shard": 2}, {"tensor": 2}], {"mesh": [{"shard": 2}, {}, {}], "sharding": [1, 0, 0]}

CASES = {
    "unlike micro-batches": ("llama", flat("llama", {"shard": 4}, 1) | {"microbatches": [1, 3, 2, 2]}),
    "1f1b of four": ("gpt2", chain("gpt2", QUARTERS, "1f1b", microbatch=2, **ALONE)),
    "1f1b, unlike micro-batches": ("llama", chain("llama", HALVES, "1f1b", **SHARED) | {"microbatches": [5, 3]}),
    "breadth first, four stages each, shared": ("eight", chain("eight", HALVES * 4, "looped_bfs", **SHARED)),
    "1f1b, tied three times": ("t5", chain("t5", HALVES, "1f1b", **SHARED)),
    "interleaved, tied": ("gpt2", chain("gpt2", LOOP, "interleaved_1f1b", **SHARED)),
    "zero bubble in a loop, copies": ("llama", chain("llama", LOOP, "interleaved_zero_bubble", **COPIES)),
    "unlike degrees, tied": ("gpt2", chain("gpt2", [(0, 1), (2,), (3,)], "1f1b", **NARROW)),
    "unlike axes in a loop, tied": ("gpt2", chain("gpt2", LOOP, "interleaved_1f1b", mesh=PAIR * 2, sharding=[1, 0] * 2)),
    "unlike axes in a v": ("llama", chain("llama", TURN, "zbv", mesh=[*PAIR, *PAIR[::-1]], sharding=[1, 0, 0, 1])),
    "both ends of a v on one, tied": (
        "gpt2", {"batch": 8, "microbatch": [1], "microbatches": [8], "schedule": "zbv", "stages": ENDS_ALONE},
    ),
    "gathered again, blocks that look at values": ("own", flat("own", {"replicate": 2, "shard": 2}, 3)),
    "gathered again, blocks read from outside": ("lent", flat("lent", {"replicate": 2, "shard": 2}, 3)),
    "1f1b, blocks that look at values": ("own", chain("own", HALVES, "1f1b", **SHARED)),
    "1f1b, copies of blocks that look at values": ("own", chain("own", HALVES, "1f1b", **COPIES)),
    "parts of the sequence between stages": (
        "gpt2", chain("gpt2", HALVES, "1f1b", mesh={"tensor": 2}, sharding=0, sequence_parallel=True),
    ),
    "parts of the sequence in a v": (
        "llama", chain("llama", TURN, "zbv", mesh={"tensor": 2}, sharding=0, sequence_parallel=True),
    ),
    "norms of heads": ("qwen3", flat("qwen3", {"replicate": 2, "tensor": 2}, 0, recompute="full")),
    "norms of heads along the sequence": ("qwen3", flat("qwen3", {"shard": 2, "tensor": 2}, 3, sequence_parallel=True)),
    "heads of keys and values that two hold": ("grouped", flat("grouped", {"tensor": 4}, 0)),
    "halves that read one norm": ("phi", flat("phi", {"shard": 2, "tensor": 2}, 1, recompute="selective")),
    "experts, gathered again": ("mixtral", flat("mixtral", {"shard": 4}, 3, expert=2, recompute="full")),
    "experts of copies": ("qwen3_moe", flat("qwen3_moe", {"replicate": 2, "shard": 2}, 2, expert=2, microbatch=2)),
    "experts of all, kept": ("qwen3_moe", flat("qwen3_moe", {"shard": 4}, 1, expert=4, recompute="selective")),
    "experts of shares and tensor groups": ("mixtral", flat("mixtral", {"shard": 2, "tensor": 2}, 3, expert=4)),
    "experts of tensor groups": ("qwen2_moe", flat("qwen2_moe", {"replicate": 2, "tensor": 2}, 0, expert=2, microbatch=2)),
    "1f1b, experts": ("mixtral", chain("mixtral", HALVES, "1f1b", expert=2, **SHARED)),
    "both ways in a v, shared": ("llama", chain("llama", TURN, "dualpipev", **SHARED)),
    "a chain beside a tensor group, tied": (
        "gpt2",
        beside(chain("gpt2", QUARTERS[:2], "1f1b", batch=6, **ALONE), flat("gpt2", {"tensor": 2}, 0, batch=2, devices=(2, 3))),
    ),
    "a tensor group beside replicas, tied": (
        "gpt2",
        beside(
            flat("gpt2", {"tensor": 2}, 0, batch=4, devices=(0, 1)), flat("gpt2", {"replicate": 2}, 0, batch=4, devices=(2, 3))
        ),
    ),
    "a v beside two alone, tied": (
        "gpt2",
        beside(
            chain("gpt2", [(0,), (1,), (1,), (0,)], "zbv", batch=4, **ALONE),
            *(flat("gpt2", {}, 0, batch=2, devices=(n,), microbatch=n - 1) for n in (2, 3)),
        ),
    ),
    "experts beside a chain": (
        "mixtral",
        beside(
            flat("mixtral", {"shard": 2}, 3, batch=6, devices=(0, 3), expert=2),
            chain("mixtral", QUARTERS[1:3], "gpipe", batch=2, recompute="full", **ALONE),
        ),
    ),
    "blocks that look at values, beside": (
        "own",
        beside(
            flat("own", {"shard": 2}, 1, batch=6, devices=(0, 1)), flat("own", {"replicate": 2}, 0, batch=2, devices=(2, 3))
        ),
    ),
}  # fmt: skip

FROM_2_13 = (
    "1f1b, tied three times",
    "parts of the sequence in a v",
    "unlike axes in a v",
    "both ends of a v on one, tied",
    "both ways in a v, shared",
    "a v beside two alone, tied",
)
"""Refused before: stages in a v, values without a gradient between stages."""

if minor_version(torch.__version__) < (2, 13):
    CASES = {name: case for name, case in CASES.items() if name not in FROM_2_13}

QUICK = (
    "unlike micro-batches", "1f1b, unlike micro-batches", "unlike axes in a loop, tied", "norms of heads",
    "norms of heads along the sequence", "heads of keys and values that two hold",
    "halves that read one norm", "parts of the sequence between stages",
    "gathered again, blocks that look at values", "experts, gathered again", "experts of copies",
)  # fmt: skip


@cache
def results_of(quick):
    from tests.runtime.job.launch import run

    cases = {name: case for name, case in CASES.items() if (name in QUICK) == quick}
    return run(4, native_worker.run_cases, cases)


@pytest.mark.parametrize("case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_equal(case):
    (model, strategy), results = CASES[case], results_of(case in QUICK)
    names = set().union(*(result[case]["names"] for result in results))
    plain = native_worker.make(model)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    assert names <= set(parameters)
    assert {id(parameters[name]) for name in names} == {id(parameter) for parameter in plain.parameters()}
    assert set().union(*(result[case]["state"] for result in results)) == set(plain.state_dict())
    for result in results:
        assert not result[case]["missing"]
        assert result[case]["loss"] < 1e-13
        assert result[case]["grad"] < 1e-10
        if "schedule" in strategy and all(one["sharding"] for one in strategy["stages"]):
            assert result[case]["ran"] == sorted(result[case]["ran"])  # all is gathered once, before the first forward
            assert result[case]["ran"][0] == "gather"
        assert result[case]["twice"] < 1e-10
        assert result[case]["norm"] < 1e-10
        assert result[case]["param"] < 1e-9
