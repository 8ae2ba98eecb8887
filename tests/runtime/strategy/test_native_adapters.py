"""Models with frozen parts, packed ones and adapters by PEFT train under strategies as the plain model does."""

from functools import cache

import pytest

from tests.runtime.strategy import native_worker
from tests.runtime.strategy.native_cases import chain, flat

pytest.importorskip("peft")

HALVES = [(0, 1), (2, 3)]
COPIES = {"mesh": {"replicate": 2}, "sharding": 0}


def cases_of(model):
    return {
        "replicas": flat(model, {"replicate": 4}, 0),
        "replicas of shards": flat(model, {"replicate": 2, "shard": 2}, 1),
        "reduced every micro-batch": flat(model, {"shard": 4}, 2),
        "gathered again": flat(model, {"shard": 4}, 3, recompute="full"),
        "tensor group, replicas": flat(model, {"replicate": 2, "tensor": 2}, 0),
        "tensor group, shards": flat(model, {"shard": 2, "tensor": 2}, 3),
        "stages, replicas": chain(model, HALVES, "1f1b", **COPIES),
        "stages, shards": chain(model, HALVES, "1f1b", mesh={"shard": 2}, sharding=1),
        "stages, tensor group": chain(model, HALVES, "gpipe", mesh={"tensor": 2}, sharding=0),
    }


CASES = {(model, name): case for model in ("frozen ends", "adapters") for name, case in cases_of(model).items()}
CASES |= {
    (model, "along the sequence"): flat(model, {"shard": 2, "tensor": 2}, 1, sequence_parallel=True)
    for model in ("frozen ends", "adapters of columns")
}
PACKED = ("replicas", "replicas of shards", "gathered again", "stages, replicas", "stages, shards")
CASES |= {("packed", name): cases_of("packed")[name] for name in PACKED}


@cache
def results_of():
    from tests.runtime.job.launch import run

    return run(4, native_worker.run_cases, {key: (key[0], case) for key, case in CASES.items()})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_equal(case):
    for result in results_of():
        assert not result[case]["missing"]
        assert max(result[case][name] for name in ("loss", "grad", "twice", "norm", "param")) < 1e-9
