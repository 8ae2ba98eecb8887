"""What torch's parts cannot run, or would run wrong without a word, is refused with the reason."""

import subprocess
import sys

import pytest

from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.why_not import ModelFacts, TensorFacts, why_not
from tests.runtime.strategy.native_cases import BLOCKS, chain, flat

SHARED = {"mesh": {"shard": 2}, "sharding": 1}
FACTS = ModelFacts(BLOCKS["llama"])


def reason(data, facts=FACTS, torch_version="2.13.0"):
    return why_not(Strategy.from_dict(data), facts, torch_version)


@pytest.mark.parametrize(
    "data",
    [
        flat("llama", {"shard": 4}, 3),
        flat("llama", {"replicate": 2, "shard": 2}, 1, recompute="full"),
        flat("llama", {"shard": 4}, 2, offload="all"),
        chain("llama", [(0, 1), (2, 3)], "1f1b", **SHARED),
        chain("llama", [(0, 1), (2, 3), (2, 3), (0, 1)], "zbv", microbatches=4, microbatch=1, **SHARED),
    ],
)
def test_runs(data):
    assert reason(data) is None


REFUSED = {
    "context": (flat("llama", {"context": 4}, 0, batch=2), "the axis context is not run"),
    "branch": (flat("llama", {"branch": 4}, 0, batch=2), "the axis branch is not run"),
    "expert": (flat("llama", {"shard": 4}, 1, expert=2), "expert parallelism is not run"),
    "optimizer": (flat("llama", {"shard": 4}, 1, offload="optimizer"), "optimizer state alone"),
    "offload without sharding": (flat("llama", {"replicate": 4}, 0, offload="all"), "CPUOffloadPolicy"),
    "offload in a pipeline": (chain("llama", [(0, 1), (2, 3)], "1f1b", offload="all", **SHARED), "offload in a pipeline"),
    "falling": (chain("llama", [(2, 3), (0, 1)], "1f1b", **SHARED), "order of the chain"),
    "four chunks": (
        chain("deep", [(0, 1), (2, 3)] * 4, "interleaved_zero_bubble", microbatches=4, microbatch=1, **SHARED),
        "loses weight gradients",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    data, words = REFUSED[name]
    assert words in reason(data, None)


def test_several_pipelines_are_refused():
    one = flat("llama", {}, 0, devices=[0], batch=4)
    two = flat("llama", {}, 0, devices=[1], batch=4)
    data = {"batch": 8, "pipelines": [{k: v for k, v in part.items() if k != "batch"} for part in (one, two)]}
    assert "several pipelines" in reason(data)


def test_stages_of_unlike_degrees_are_refused_where_values_have_no_samples():
    data = chain("llama", [(0, 1), (2,)], "1f1b", mesh=[{"replicate": 2}, {}], sharding=0)
    assert reason(data) is None
    assert "micro-batches of one size" in reason(data | {"microbatches": [5, 3]})
    assert "unlike data degrees: why" in reason(data, ModelFacts(BLOCKS["llama"], no_samples="why"))
    alike = chain("llama", [(0, 1), (2, 3)], "1f1b", mesh=[{"replicate": 2}, {"shard": 2}], sharding=[0, 1])
    assert reason(alike, ModelFacts(BLOCKS["llama"], no_samples="why")) is None


def test_facts_of_the_model_refuse():
    shared, tensor = flat("llama", {"shard": 4}, 1), flat("llama", {"tensor": 4}, 0)
    staged = chain("llama", [(0, 1), (2, 3)], "1f1b", **SHARED)
    assert "SyncBatchNorm" in reason(shared, ModelFacts(BLOCKS["llama"], batch_norm=True))
    assert "twice" in reason(flat("llama", {}, 0, devices=[0], recompute="full"), ModelFacts(batch_norm=True))
    assert "cannot be cut into stages: why" in reason(staged, ModelFacts(BLOCKS["llama"], no_cut="why"))
    assert reason(shared, ModelFacts(BLOCKS["llama"], no_cut="why")) is None
    assert "no tensor-parallel layout: why" in reason(tensor, ModelFacts(BLOCKS["llama"], tensor=TensorFacts("why")))
    assert "does not divide 6" in reason(tensor, ModelFacts(BLOCKS["llama"], tensor=TensorFacts(parts=6)))
    sequence = flat("llama", {"tensor": 4}, 0, sequence_parallel=True)
    assert "no sequence parallelism: why" in reason(sequence, ModelFacts(tensor=TensorFacts(no_sequence="why")))
    assert "no stage names the block lm_tail" in reason(staged, ModelFacts((*BLOCKS["llama"], "lm_tail")))


def test_old_versions_of_torch_are_refused():
    v = chain("llama", [(0, 1), (2, 3), (2, 3), (0, 1)], "zbv", microbatches=4, microbatch=1, **SHARED)
    assert "torch 2.13" in reason(v, torch_version="2.12.1+cpu")
    assert "older than 2.11" in reason(flat("llama", {"shard": 4}, 1), torch_version="2.10.0")


def test_it_is_asked_without_torch():
    code = "import sys; import rlplace.runtime.strategy.why_not; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "False"
