"""Running statistics under a strategy: those of the plain model on the same micro-batches, or a refusal."""

import torch
from torch import nn

from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.facts import model_facts
from rlplace.runtime.strategy.run import prepare
from rlplace.runtime.strategy.why_not import why_not
from tests.runtime.job.launch import run
from tests.runtime.strategy.native_cases import stage

STEPS, MICROBATCHES = 2, 3


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()


def two_stages(mesh=None, sharding=0):
    size = 1 if mesh is None else 2
    devices = [range(size), range(size, 2 * size)]
    stages = [stage(blocks, held, mesh or {}, sharding) for blocks, held in zip((("0", "1"), ("2", "3")), devices, strict=True)]
    parts = {"batch": 4 * MICROBATCHES * size, "microbatch": [4], "microbatches": [MICROBATCHES], "schedule": "1f1b"}
    return Strategy.from_dict(parts | {"stages": stages})


def square(output, part):
    return output.square().mean()


def batch():
    return {"input": torch.randn(4 * MICROBATCHES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def in_a_pipeline():
    native = prepare(normed(), two_stages(), {"input": batch()["input"][:4]})
    for _ in range(STEPS):
        native.step(batch(), square)
    return {name: value for name, value in native.state_dict().items() if "running" in name or "tracked" in name}


def test_a_pipeline_counts_every_micro_batch_once():
    plain = normed()
    for _ in range(STEPS):
        for part in batch()["input"].chunk(MICROBATCHES):
            square(plain(part), None).backward()
    found = {name: value for own in run(2, in_a_pipeline) for name, value in own.items()}
    wanted = {name: value for name, value in plain.state_dict().items() if name in found}
    assert len(found) == 6 and int(found["1.num_batches_tracked"]) == STEPS * MICROBATCHES
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_keeps_statistics_is_refused_over_replicas():
    over = two_stages({"replicate": 2})
    assert "SyncBatchNorm" in why_not(over, model_facts(normed()))
    assert why_not(over, model_facts(nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4), nn.Linear(4, 4), nn.ReLU()))) is None
    counting = nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(4, 4), nn.ReLU())
    assert "statistics per replica" in why_not(over, model_facts(counting))


def test_statistics_of_all_processes_are_refused_in_a_pipeline():
    together = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    assert "waits for processes of other stages" in why_not(two_stages(), model_facts(together))
    flat = {
        "batch": 8,
        "microbatch": [4],
        "microbatches": [1],
        "stages": [stage(("0", "1", "2", "3"), (0, 1), {"replicate": 2}, 0)],
    }
    assert why_not(Strategy.from_dict(flat), model_facts(together)) is None
