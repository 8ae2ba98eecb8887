"""The stage-graph engine trains like the model itself, whatever goes where, and with what NCCL needs beside gloo."""

import pytest
import torch
import torch.distributed as dist
from equal import build
from launch import run
from loops import DOUBLE, case, check, train

from rlplace.runtime.distributed.execution import wire

MODELS = ("t5", "vit", "resnet", "mixtral", "lstm", "awkward", "inception")


def check_all(world, pairs):
    """Trains models with options of a plan; the ranks together hold the parameters."""
    cases = [case(name, world, engine="stage_graph", **options) for name, options in pairs]
    for (name, _), ranks in zip(pairs, check(world, cases), strict=True):
        assert set().union(*(rank["names"] for rank in ranks)) == {key for key, _ in build(name)[0].named_parameters()}, name


def test_two_processes():
    pairs = [(name, {"deal": "random", "seed": 1}) for name in ("gpt2", "t5", "awkward")]
    check_all(2, pairs + [(name, {"microbatches": 2, "schedule": "1f1b"}) for name in ("gpt2", "lstm")])


OPS = {"deal": "random", "groups": None, "seed": 4}
PARTS = {"deal": "random", "seed": 5, "microbatches": 2}
GPIPE = {"microbatches": 4, "schedule": "gpipe"}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ways"), [(2, (OPS, GPIPE)), (4, (PARTS,))])
def test_all_models(world, ways):
    check_all(world, [(name, options) for name in MODELS for options in ways])


def as_for_nccl():
    """Trains with a group for each direction, and says which directions were connected."""
    torch.set_num_threads(1)
    told = dist.get_backend
    dist.get_backend = lambda group=None: "no tags"
    try:
        options = {"deal": "random", "seed": 2, "microbatches": 2, "schedule": "1f1b"}
        found = {engine: train("awkward", 2, steps=2, engine=engine, **options) for engine in ("stage_graph", "joint_graph")}
        found["pipeline"] = train("t5", 2, steps=2, engine="pipeline", **options | {"deal": "chain"})
        return found, len(wire._connected)
    finally:
        dist.get_backend = told


@pytest.mark.slow
def test_every_direction_has_a_group_of_its_own():
    for worst, connected in run(2, as_for_nccl, timeout_s=120):
        assert connected == 2
        for found in worst.values():
            assert all(found["worst"][what] <= limit for what, limit in DOUBLE.items()), found
