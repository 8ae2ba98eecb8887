"""BatchNorm under a strategy: the plain model's gradients and running statistics on the same parts of a batch."""

import torch
from torch import nn

from rlplace.plan.strategy import Strategy
from rlplace.runtime.state.whole import whole_tensor
from rlplace.runtime.strategy.blocks import has_batch_norm
from rlplace.runtime.strategy.fact_records import ModelFacts
from rlplace.runtime.strategy.facts import facts_of
from rlplace.runtime.strategy.notes import notes_of
from rlplace.runtime.strategy.run import prepare
from rlplace.runtime.strategy.why_not import why_not
from tests.runtime.job.launch import run
from tests.runtime.strategy.native_cases import stage

STEPS, MICROBATCHES = 2, 3


def normed(momentum=0.1):
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(4, momentum=momentum) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 4), norms[0], nn.Linear(4, 4), norms[1]).double()


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


def state_of(native):
    names = [name for name, _ in native.meta_model.named_parameters()]
    kept = {name: value for name, value in native.state_dict().items() if "running" in name or "tracked" in name}
    gradients = {name: whole_tensor(p.grad) for name, p in native.named_parameters() if p.grad is not None}
    return kept, {name: gradients[name] for name in names if name in gradients}


def over_replicas(cases):
    """Two steps without an update under every strategy; one model a case."""
    found = []
    for strategy, momentum in cases:
        native = prepare(normed(momentum), strategy, {"input": images(strategy)[:4]})
        for _ in range(STEPS):
            native.zero_grad()
            native.step({"input": images(strategy)}, square)
        found.append(state_of(native))
    return found


def images(strategy):
    return torch.randn(strategy.batch, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).square()


def flat(mesh, sharding, statistics, passes=1):
    only = [stage(("0", "1", "2", "3"), (0, 1), mesh, sharding)]
    parts = {"batch": 8 * passes, "microbatch": [4], "microbatches": [passes], "statistics": statistics}
    return Strategy.from_dict(parts | {"stages": only})


CASES = {
    "replicas": (flat({"replicate": 2}, 0, "replica"), 0.1),
    "replicas, micro-batches": (flat({"replicate": 2}, 0, "replica", 3), 0.1),
    "level 3": (flat({"shard": 2}, 3, "replica"), 0.1),
    "together": (flat({"replicate": 2}, 0, "batch"), 0.1),
    "together, level 3, cumulative averages": (flat({"shard": 2}, 3, "batch"), None),
    "together, micro-batches": (flat({"shard": 2}, 1, "batch", 2), 0.1),
}
"""Strategies of two processes, with the momentum of running statistics."""


def expected(strategy, momentum):
    """Computes the same by plain torch: parts of one replica after the other, or of all replicas together."""
    model, together = normed(momentum), strategy.statistics == "batch"
    halves = [half.split(4) for half in images(strategy).chunk(2)]
    for _ in range(STEPS):
        model.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for replica in range(1 if together else 2):
            if replica:
                first = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(before)
            parts = [torch.cat(pair) for pair in zip(*halves, strict=True)] if together else halves[replica]
            for part in parts:
                (square(model(part), None) * len(part) / strategy.batch).backward()
            if replica:
                model.load_state_dict(first)
    kept = {name: value for name, value in model.state_dict().items() if "running" in name or "tracked" in name}
    return kept, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_replicas_normalize_by_their_own_samples_or_by_all():
    for rank, own in enumerate(run(2, over_replicas, [*CASES.values()])):
        for name, (case, found) in zip(CASES, zip(CASES.values(), own, strict=True), strict=True):
            for made, wanted in zip(found, expected(*case), strict=True):
                assert made.keys() == wanted.keys(), (name, rank)
                torch.testing.assert_close(
                    made, wanted, rtol=1e-11, atol=1e-11, msg=lambda text, at=(name, rank): f"{at}: {text}"
                )


def hybrid(statistics):
    only = [stage(("0", "1", "2", "3"), (0, 1, 2, 3), {"replicate": 2, "shard": 2}, 3)]
    return Strategy.from_dict({"batch": 16, "microbatch": [4], "microbatches": [1], "statistics": statistics, "stages": only})


def test_replicas_of_shares_normalize_together():
    strategy = hybrid("batch")
    model = normed()
    for _ in range(STEPS):
        model.zero_grad()
        square(model(images(strategy)), None).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for ((kept, found),) in run(4, over_replicas, [(strategy, 0.1)]):
        torch.testing.assert_close(found, gradients, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(kept, {name: model.state_dict()[name] for name in kept}, rtol=1e-11, atol=1e-11)


def synchronized():
    strategy = flat({"replicate": 2}, 0, "replica")
    native = prepare(nn.SyncBatchNorm.convert_sync_batchnorm(normed()), strategy, {"input": images(strategy)[:4]})
    for _ in range(STEPS):
        native.zero_grad()
        native.step({"input": images(strategy)}, square)
    return state_of(native)


def test_a_model_with_synchronized_norms_normalizes_by_all_samples_on_processors():
    for found in run(2, synchronized):
        for made, wanted in zip(found, expected(flat({"replicate": 2}, 0, "batch"), 0.1), strict=True):
            torch.testing.assert_close(made, wanted, rtol=1e-11, atol=1e-11)


def in_two_stages_of_replicas():
    strategy = two_stages({"replicate": 2})
    together = Strategy.from_dict(strategy.to_dict() | {"statistics": "batch"})
    return over_replicas([(strategy, 0.1), (together, 0.1)])


def test_stages_of_replicas_have_statistics_of_their_own():
    found = run(4, in_two_stages_of_replicas)
    for at, statistics in enumerate(("replica", "batch")):
        strategy = Strategy.from_dict(two_stages({"replicate": 2}).to_dict() | {"statistics": statistics})
        wanted = expected(strategy, 0.1)
        for own in found:
            for made, values in zip(own[at], wanted, strict=True):
                torch.testing.assert_close(made, {name: values[name] for name in made}, rtol=1e-11, atol=1e-11)


def test_norms_whose_statistics_stand_have_none_of_their_own():
    model = normed()
    assert has_batch_norm(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    assert not has_batch_norm(model)
    assert not has_batch_norm(nn.Sequential(nn.InstanceNorm1d(4)))
    assert has_batch_norm(nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True)))


def test_a_micro_batch_of_one_sample_is_refused_where_a_norm_takes_none():
    facts = facts_of(normed(), {"input": images(flat({"replicate": 2}, 0, "replica"))})
    assert facts.batch_norm and "more than 1 value per channel" in str(facts.no_single)
    single = {"batch": 2, "microbatch": [1], "microbatches": [1]}
    alone = Strategy.from_dict(flat({"replicate": 2}, 0, "replica").to_dict() | single)
    assert "plan with microbatch=2" in why_not(alone, facts)
    assert why_not(flat({"replicate": 2}, 0, "replica"), facts) is None
    pixels = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3))
    assert facts_of(pixels, {"input": torch.randn(4, 3, 8, 8)}, torch.sum).no_single is None


def test_notes_say_what_norms_normalize_by():
    facts = facts_of(normed(), {"input": images(flat({"replicate": 2}, 0, "replica"))}, torch.mean)
    (note,) = notes_of(CASES["replicas"][0], facts)
    assert "statistics of 4 a replica, as DDP does" in note
    assert "one micro-batch of every replica" in next(notes_of(CASES["together, micro-batches"][0], facts))
    assert not [*notes_of(CASES["together"][0], facts)]


def test_unlike_data_degrees_are_refused():
    stages = [stage(("0", "1"), (0, 1), {"replicate": 2}, 0), stage(("2", "3"), (2,), {}, 0)]
    parts = {"batch": 8, "microbatch": [4], "microbatches": [1], "schedule": "gpipe", "stages": stages}
    assert "unlike numbers of samples" in why_not(Strategy.from_dict(parts), ModelFacts(batch_norm=True))
