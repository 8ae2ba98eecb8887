"""The ops of a draft where random drafts leave room: buckets and gradients of models that are hardly anything but weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.simulator import simulate
from rlplace.strategy.drafts import Mesh, plain_draft
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.op_level.expand import expand_draft
from rlplace.strategy.search.op_level import evaluate_ops
from tests.strategy.random_costs import random_costs
from tests.strategy.random_ops import RandomOps

MIB = 1 << 20
CLUSTER = Cluster.preset("a100-80g:4")


def weights_alone(sizes):
    """Blocks with weights of so many bytes, of which a backward makes gradients in ten pieces, and next to no activations."""
    costs = random_costs(np.random.default_rng(0), CLUSTER, len(sizes))
    none = np.ones(len(sizes))
    return RandomOps.of(
        dataclasses.replace(costs, weights=np.array(sizes, float), activation=none, border=none, item=1.0, known={})
    )


def test_buckets_are_full_at_one_and_then_at_25_mebibytes():
    """Twenty pieces of 4 MiB: the first is a bucket, then seven are one (28 MiB), seven more, and the five that are left."""
    costs = weights_alone([40 * MIB] * 2)
    expanded = expand_draft(plain_draft((0, 2), [Mesh((0, 1), replicate=2)], microbatches=(2,)), costs, CLUSTER)
    problem = expanded.problem
    found = {name: op for op, name in enumerate(problem.op_names) if name.startswith("bucket")}
    assert len(found) == 4
    took = [float(problem.time_s[op].min()) for _, op in sorted(found.items())]
    wanted = [collective_s(CLUSTER.links, "all_reduce", (0, 1), float(size * MIB)) for size in (4, 28, 28, 20)]
    assert took == pytest.approx(wanted, rel=0.01)


def test_replicas_on_unlike_devices_are_lanes_of_their_own():
    mixed = Cluster.preset("a100-80g:2+t4:2")
    costs = RandomOps.of(random_costs(np.random.default_rng(0), mixed, 3))
    for devices, stands_for in (((0, 1), ((0, 1),)), ((0, 2), ((0,), (2,))), ((2, 3), ((2, 3),))):
        draft = plain_draft((0, 3), [Mesh(devices, replicate=2)])
        assert expand_draft(draft, costs, mixed).stands_for == stands_for


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_weights_and_gradients_of_every_level(level, microbatches):
    """Where there is nothing else, both executors hold the same to a thousandth: no gradient twice, and none too few."""
    costs = weights_alone([64 * MIB, 32 * MIB, 96 * MIB])
    place = Mesh((0, 1), shard=2, sharding=level) if level else Mesh((0, 1), replicate=2)
    draft = plain_draft((0, 3), [place], microbatches=(microbatches,))
    expanded = expand_draft(draft, costs, CLUSTER)
    line = simulate(expanded.problem, expanded.problem.group_device, order=expanded.order)
    said = DraftEvaluator(costs, CLUSTER).evaluate(draft)
    held = np.array(said.peak_memory_bytes[:1]) - CLUSTER.devices[0].reserved_bytes
    assert line.peak_memory_bytes[0] == pytest.approx(held[0], rel=1e-3)
    if level == 0:  # weights, gradients and six times as much state, whole
        assert held[0] == pytest.approx(8 * 192 * MIB, rel=1e-3)
    if level == 1 and microbatches > 1:  # half of all that, and whole weights and gradients besides
        assert held[0] >= (8 / 2 + 2) * 192 * MIB * 0.999


def test_a_host_holds_what_all_of_its_devices_put_there():
    """Two replicas of one host, or one on each of two hosts, of what a single device has there."""
    hosts = Cluster.preset("a100-80g:2x2,ib=400g")
    costs = RandomOps.of(random_costs(np.random.default_rng(0), hosts, 3))

    def there(place):
        draft = plain_draft((0, 3), [place])
        return DraftEvaluator(costs, hosts).evaluate(dataclasses.replace(draft, offload=bytes([2, 2, 2]))).host_bytes

    single = there(Mesh((0,)))
    assert single[0] > 0 and single[1] == 0
    assert there(Mesh((0, 1), replicate=2)) == pytest.approx((2 * single[0], 0), rel=1e-6)
    assert there(Mesh((0, 2), replicate=2)) == pytest.approx((single[0], single[0]), rel=1e-6)


def test_what_a_host_has_no_room_for_is_over_capacity():
    """Both replicas of the first host put as much there; the second host has room for one, the first for one and a half, each
    with a block a process for its start."""
    hosts = Cluster.preset("a100-80g:2x2,ib=400g")
    costs = RandomOps.of(random_costs(np.random.default_rng(0), hosts, 3))
    draft = dataclasses.replace(plain_draft((0, 3), [Mesh((0, 1), replicate=2)]), offload=bytes([2, 2, 2]))
    free = DraftEvaluator(costs, hosts).evaluate(draft)
    assert free.feasible
    single, block = free.host_bytes[0] // 2, int(costs.held().weight_bytes.max())
    assert free.starting_bytes[0] == pytest.approx(2 * (single + block), abs=2)
    small = dataclasses.replace(hosts, host_memory_bytes=(single * 3 // 2 + 2 * block, single + block + 1))
    found = DraftEvaluator(costs, small).evaluate(draft)
    assert not found.feasible
    assert found.over_bytes == pytest.approx(single / 2, abs=2)
    assert DraftEvaluator(costs, small).score(draft)[1] == pytest.approx(found.over_bytes, abs=2)
    assert evaluate_ops(draft, costs, small, found).over_bytes == pytest.approx(found.over_bytes, abs=2)
    apart = dataclasses.replace(draft, places=(Mesh((1, 2), replicate=2),))
    assert DraftEvaluator(costs, small).evaluate(apart).feasible
