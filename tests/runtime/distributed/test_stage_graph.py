"""The stage-graph engine trains like the model itself, whatever goes where."""

import pytest
from equal import build
from loops import case, check

MODELS = ("gpt2", "bert", "t5", "vit", "resnet", "mixtral", "lstm", "awkward", "inception")


def check_all(world, pairs):
    """Trains models with options of a plan; the ranks together hold the parameters."""
    cases = [case(name, world, engine="stage_graph", **options) for name, options in pairs]
    for (name, _), ranks in zip(pairs, check(world, cases), strict=True):
        assert set().union(*(rank["names"] for rank in ranks)) == {key for key, _ in build(name)[0].named_parameters()}, name


def test_two_processes():
    pairs = [(name, {"deal": "random", "seed": 1}) for name in ("gpt2", "t5", "awkward")]
    check_all(2, pairs + [(name, {"microbatches": 2, "schedule": "1f1b"}) for name in ("gpt2", "lstm")])


GROUPS = {"deal": "random", "seed": 3}
OPS = {"deal": "random", "groups": None, "seed": 4}
PARTS = {"deal": "random", "seed": 5, "microbatches": 2}
GPIPE = {"microbatches": 4, "schedule": "gpipe"}
PIPELINE = {"microbatches": 4, "schedule": "1f1b"}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ways"), [(2, (GROUPS, OPS, GPIPE)), (4, (PARTS, PIPELINE))])
def test_all_models(world, ways):
    check_all(world, [(name, options) for name in MODELS for options in ways])
