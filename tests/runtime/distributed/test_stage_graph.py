"""The stage-graph engine trains like the model itself, whatever goes where."""

import pytest
from equal import build, train_both
from launch import run

MODELS = ("gpt2", "bert", "t5", "vit", "resnet", "mixtral", "lstm", "awkward", "inception")
TOLERANCE = {"loss": 2e-6, "gradient": 1e-9, "parameter": 1e-9, "buffer": 1e-9}
"""Models run in double precision; transformers computes the loss in single precision all the same."""
SINGLE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 2e-4, "buffer": 0.0}
"""Of a model that has no double precision. AdamW makes a whole step of a gradient that is nothing but rounding."""


def job(names, options):
    return {name: train_both(name, engine="stage_graph", **options) for name in names}


def check(names, world, **options):
    ranks = run(world, job, list(names), options, timeout_s=300)
    for name in names:
        for rank, found in enumerate(ranks):
            worst = found[name][0]
            assert all(worst[what] <= limit for what, limit in (SINGLE if name == "mixtral" else TOLERANCE).items()), (
                name,
                rank,
                worst,
            )
        held = [set(found[name][2]) for found in ranks]
        model, _, _ = build(name)
        assert set().union(*held) == {key for key, _ in model.named_parameters()}, name
    return ranks


def test_groups_on_random_devices():
    ranks = check(("gpt2", "t5", "awkward"), 2, seed=1)
    assert all(any(found[name][1] for found in ranks) for name in ("gpt2", "t5"))


def test_micro_batches_of_a_pipeline():
    check(("gpt2", "lstm"), 2, deal="chain", microbatches=2, schedule="1f1b")


WAYS = {
    "groups": {"seed": 3},
    "ops": {"groups": None, "seed": 4},
    "micro-batches": {"seed": 5, "microbatches": 2},
    "gpipe": {"deal": "chain", "microbatches": 4, "schedule": "gpipe"},
    "1f1b": {"deal": "chain", "microbatches": 4, "schedule": "1f1b"},
}
LONG = {("groups", 4), ("ops", 4), ("micro-batches", 2), ("gpipe", 4), ("1f1b", 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "world"), [pytest.param(way, n, marks=[pytest.mark.long] * ((way, n) in LONG)) for way in WAYS for n in (2, 4)]
)
def test_all_models(way, world):
    check(MODELS, world, **WAYS[way])


@pytest.mark.slow
def test_replicas_of_two_devices():
    # The awkward model's forward reads a running average, of which every replica has its own, as in DDP.
    names = [name for name in MODELS if name != "awkward"]
    check(names, 4, replicas=[[0, 1], [2, 3]], microbatches=2, seed=6)
