"""Replicas and the stage-graph engine train like one process, whatever goes where, and with what NCCL needs beside gloo."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equal import build
from launch import run
from loops import DOUBLE, Pair, case, check, train

from rlplace.runtime.distributed.execution import replicas, wire
from rlplace.runtime.distributed.execution.replicas import GradientReducer
from rlplace.runtime.distributed.state import shares
from rlplace.runtime.distributed.state.shares import share_of


def check_state(ranks, places, count):
    """The moments of AdamW take twice the bytes of the parameters, shared among the replicas of a place."""
    for place in range(places):
        twins = [rank for rank in ranks if rank["rank"] % places == place and rank["rank"] < places * count]
        assert sum(rank["state_bytes"] for rank in twins) == 2 * twins[0]["own_bytes"] > 0
        for rank in twins:
            assert rank["state_bytes"] <= 2 * rank["own_bytes"] / count * 1.15


@pytest.mark.slow
def test_replicas_of_two_devices_share_the_optimizer():
    found = check(
        4,
        [
            case("awkward", 2, 2, deal="random", seed=1, steps=3, recompute=[[1], [2, 3]], optimizer_sharding=True),
            case("resnet", 1, 2, steps=2, microbatches=2),
        ],
    )
    check_state(found[0], 2, 2)
    assert found[1][2]["own_bytes"] == 0 and found[1][0]["own_bytes"] > 0  # ranks 2 and 3 are outside the plan


CHAIN = (2, 2), {"microbatches": 2}
COPIES = (1, 4), {}
ANYWHERE = (2, 2), {"deal": "random", "seed": 5, "recompute": [[1, 2], [4]]}


@pytest.mark.slow
def test_all_models():
    """Every shape with a sharded optimizer and without."""
    ways = [("gpt2", CHAIN, 1), ("gpt2", COPIES, 0), ("gpt2", ANYWHERE, 1), ("resnet", CHAIN, 0), ("resnet", COPIES, 1)]
    ways += [("lstm", CHAIN, 1), ("mixtral", ANYWHERE, 1), ("t5", ANYWHERE, 0)]
    cases = [case(name, *shape[0], **shape[1], optimizer_sharding=bool(sharded)) for name, shape, sharded in ways]
    for (_, shape, sharded), ranks in zip(ways, check(4, cases), strict=True):
        if sharded:
            check_state(ranks, *shape[0])


def few_samples():
    """A batch of one sample for two replicas, a parameter that never gets a gradient, and one that is frozen."""
    # One sample has no batch statistics of its own.
    pair = Pair("awkward", 1, 2, optimizer_sharding=True, microbatches=2, change=lambda model: model.norm.eval())
    loss = pair.placed_loss(**pair.batch(1))
    expected = pair.plain_step(pair.batch(1))
    loss.backward()
    pair.compare_gradients()
    without = {name for name, parameter in pair.placed.named_parameters() if parameter.grad is None}
    return abs(loss.item() - expected), without, pair.worst["gradient"]


@pytest.mark.slow
def test_a_replica_without_samples_takes_part():
    for difference, without, gradient in run(2, few_samples):
        assert difference < 1e-9 and gradient < 1e-9
        assert without == {"unused.weight", "unused.bias", "frozen"}


def overlap(sharded):
    """Buckets that were on their way before the last backward pass ended, and all buckets."""
    pair = Pair("gpt2", 1, 2, microbatches=2, optimizer_sharding=sharded)
    begun, launched = [], []
    finish, launch = GradientReducer.finish, GradientReducer._launch

    def finish_and_note(self):
        begun.append((self._next, len(self._buckets)))
        finish(self)

    def launch_and_note(self, bucket):
        launched.append(bool(self._completing) and len(bucket.waiting) == 0)
        launch(self, bucket)

    with (
        mock.patch.multiple(GradientReducer, finish=finish_and_note, _launch=launch_and_note),
        mock.patch.multiple(replicas, FIRST_BUCKET_BYTES=1 << 12),
        mock.patch.multiple(shares, BUCKET_BYTES=1 << 12),
    ):
        pair.placed_loss(**pair.inputs).backward()
    pair.plain_step(pair.inputs)
    pair.compare_gradients()
    return begun, launched, pair.worst


def overlaps():
    return [overlap(sharded) for sharded in (False, True)]


@pytest.mark.slow
def test_buckets_leave_while_the_backward_runs():
    for ways in run(2, overlaps, timeout_s=300):
        for begun, launched, worst in ways:
            assert begun[0][0] == begun[0][1] > 5 and all(launched)
            assert worst["gradient"] < 1e-9


@pytest.mark.parametrize("shape", [(7,), (1,), (), (8, 3), (1, 197, 8), (3, 10, 2), (2, 5), (30522, 2), (1, 1, 64)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shares_cover_a_parameter_once(shape, count):
    whole = torch.zeros(shape)
    shares = [share_of(shape, count, replica) for replica in range(count)]
    if shares[0].dim is None:
        assert whole.numel() == 1
        return
    for share in shares:
        share.of(whole).add_(1.0)
    assert (whole == 1.0).all()
    chunks = [chunk.shape for chunk in whole.chunk(count, shares[0].dim)]
    assert [share.of(whole).shape for share in shares][: len(chunks)] == chunks  # as DTensor's Shard has them


def test_shares_of_large_parameters_are_even_and_contiguous():
    for shape in ((50257, 64), (1024,), (1, 197, 64), (64, 3, 4, 4)):
        parts = [share_of(shape, 4, replica).of(torch.zeros(shape)) for replica in range(4)]
        assert all(part.is_contiguous() for part in parts)
        assert max(part.numel() for part in parts) <= 1.05 * torch.zeros(shape).numel() / 4
    experts = [share_of((6, 128, 64), 4, replica).of(torch.zeros(6, 128, 64)).numel() for replica in range(4)]
    assert max(experts) == min(experts)  # six experts on four replicas: cut in another dimension


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
def test_models_anywhere(world, ways):
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
