"""Strategies on four processes give the loss, the gradients and the trained parameters of the plain model.

All cases run in one launch; a case is a model and a strategy, in double precision.
"""

import native_worker
import pytest
from native_cases import flat

pytest.importorskip("transformers")

CASES = {
    "gathered once": ("llama", flat("llama", {"shard": 4}, 1)),
    "reduced every pass": ("gpt2", flat("gpt2", {"shard": 4}, 2)),
    "gathered again": ("gpt2", flat("gpt2", {"shard": 4}, 3)),
    "hybrid": ("llama", flat("llama", {"replicate": 2, "shard": 2}, 1)),
    "copies": ("gpt2", flat("gpt2", {"replicate": 4}, 0)),
    "gathered again, recomputed": ("llama", flat("llama", {"shard": 4}, 3, recompute="full")),
    "gathered once, recomputed in part": ("llama", flat("llama", {"shard": 4}, 1, recompute="selective")),
    "in host memory": ("gpt2", flat("gpt2", {"shard": 4}, 3, offload="all")),
    "unlike micro-batches": ("llama", flat("llama", {"shard": 4}, 1) | {"microbatches": [1, 3, 2, 2]}),
}


@pytest.fixture(scope="module")
def results():
    from launch import run

    return run(4, native_worker.run_cases, CASES)


@pytest.mark.parametrize("case", CASES)
def test_equal(case, results):
    model = CASES[case][0]
    names = set().union(*(result[case]["names"] for result in results))
    assert names == {name for name, _ in native_worker.make(model).named_parameters()}
    for result in results:
        assert not result[case]["missing"]
        assert result[case]["loss"] < 1e-13
        assert result[case]["grad"] < 1e-10
        assert result[case]["param"] < 1e-9
