"""What executors are given: tables of traffic, ways, frames and rows, by hand and as if nothing had been kept."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.cluster.interconnect import DEVICES_PER_SOCKET, HOST_MEMORY_BYTES_PER_S
from rlplace.cluster.links import Links
from rlplace.strategy.costs import Cut, Tie
from rlplace.strategy.drafts import Mesh, plain_draft
from rlplace.strategy.executor import arrays as c
from rlplace.strategy.executor.meshes import Border, Groups, borders, copy_groups, share_groups, tensor_groups
from rlplace.strategy.executor.packing import Packer
from rlplace.strategy.executor.traffic import ClusterTraffic, table_s, tie_exchanges
from tests.strategy.random_costs import random_costs, random_draft

FOUR = Cluster.preset("a100-80g:4")
MIXED = Cluster.preset("a100-80g:2+t4:2")
SIZE = float(1 << 26)


def joined_by(bandwidth, channels=None):
    """The cluster of four with other links."""
    return dataclasses.replace(FOUR, links=Links(bandwidth, np.full((4, 4), 1e-6), channels), text=None)


def packed(cluster, blocks=6, **changes):
    costs = dataclasses.replace(random_costs(np.random.default_rng(0), cluster, blocks), known={}, **changes)
    return costs, Packer(costs, cluster, ClusterTraffic(cluster))


def test_several_groups_take_as_long_as_the_slowest():
    bandwidth = np.full((4, 4), 1e9)
    bandwidth[2, 3] = bandwidth[3, 2] = 1e8
    cluster = joined_by(bandwidth)
    quick, slow = (collective_s(cluster.links, "all_reduce", group, SIZE) for group in ((0, 1), (2, 3)))
    assert slow > 5 * quick
    assert table_s(ClusterTraffic(cluster).table("all_reduce", Groups((0, 1, 2, 3), 2)), SIZE) == pytest.approx(slow)
    assert table_s(ClusterTraffic(cluster).table("all_reduce", Groups((0, 1), 2)), SIZE) == pytest.approx(quick)


def test_ways_that_share_a_channel_hold_one_number_in_common():
    """From 0 to 1 over channels 0 and 1, from 2 to 3 over the first of them, from 1 to 2 over the second."""
    held = [[() for _ in range(4)] for _ in range(4)]
    held[0][1], held[2][3], held[1][2] = (0, 1), (0,), (1,)
    cluster = joined_by(np.full((4, 4), 1e9), tuple(map(tuple, held)))
    pairs = {(0, 1): Border((0,), (1,), 1.0), (2, 3): Border((2,), (3,), 1.0), (1, 2): Border((1,), (2,), 0.5)}
    ways = ClusterTraffic(cluster).ways(pairs)
    first, second, third = (set(ways[border].channels) for border in pairs)
    assert first & second and first & third and not second & third
    assert (ways[0, 1].latency_s, ways[0, 1].part, ways[1, 2].part) == (1e-6, 1.0, 0.5)
    assert ways[1, 2].s_per_byte == pytest.approx(1e-9)


@pytest.mark.parametrize("devices", [3, DEVICES_PER_SOCKET, DEVICES_PER_SOCKET + 1, 2 * DEVICES_PER_SOCKET])
def test_devices_of_a_host_share_the_memory_of_its_sockets(devices):
    sockets = 1 if devices <= DEVICES_PER_SOCKET else 2
    traffic = ClusterTraffic(Cluster.preset(f"a100-80g:{devices}"))
    assert devices * traffic.host_memory_bytes_per_s(0) == pytest.approx(sockets * HOST_MEMORY_BYTES_PER_S)


FIELDS = ("stage_place", "places", "microbatches", "actions", "action_ptr", "ways", "way_ptr", "way_channels", "room_bytes")
TABLES = (c.GATHER_TABLE, c.SCATTER_TABLE, c.REDUCE_TABLE, c.EXPERT_GATHER_TABLE, c.EXPERT_SCATTER_TABLE, c.TURN_TABLE)


def contents(packer, draft):
    """A frame with its rows and tables in place of their numbers, which depend on what was asked before."""
    frame = packer.frame(draft)
    found = {name: getattr(frame.arrays, name) for name in FIELDS}
    found["tables"] = packer.traffic.tables[frame.arrays.places[:, TABLES].astype(int)]
    found["places"] = np.delete(frame.arrays.places, TABLES, axis=1)
    return found | {"rows": packer.costed.rows[frame.arrays.row]}


def unlike_pairs():
    """Drafts on the same devices that differ in one thing each."""
    pair = [Mesh((0, 1), replicate=2), Mesh((2, 3), replicate=2)]
    narrow = [pair[0], Mesh((2, 3), tensor=2)]
    for places, size, count in ((pair, 1, 4), (pair, 1, 8), (pair, 2, 4), (narrow, 1, 4), (narrow[::-1], 1, 4)):
        yield plain_draft((0, 3, 6), places, microbatch=(size,), microbatches=(count,), schedule="1f1b")
    yield plain_draft((0, 3, 6), pair, microbatches=(4,), schedule="gpipe")
    yield plain_draft((0, 2, 6), pair, microbatches=(4,), schedule="gpipe")


@pytest.mark.parametrize("cluster", [FOUR, MIXED], ids=["alike", "mixed"])
def test_what_was_packed_before_changes_nothing(cluster):
    rng = np.random.default_rng(1)
    drafts = [*unlike_pairs(), *(random_draft(rng, cluster, 6) for _ in range(40))]
    costs, kept = packed(cluster)
    for draft in drafts:
        found, fresh = contents(kept, draft), contents(Packer(costs, cluster, ClusterTraffic(cluster)), draft)
        for name, wanted in fresh.items():
            np.testing.assert_array_equal(found[name], wanted, err_msg=name)
        assert found["microbatches"].max() == max(draft.microbatches)


def test_a_row_is_that_of_the_slowest_replica_and_kind():
    """A replica on each kind of device: the t4 is slower at a third of the samples, and the other then keeps more."""
    for samples in ((1, 3), (3, 1)):
        costs, packer = packed(MIXED, ties=(), fixed_s=0.0)
        place = Mesh((0, 2), shard=2, sharding=2)  # whose replicas wait for each other
        frame = packer.frame(plain_draft((0, 6), [place], microbatch=samples))
        rows = packer.costed.rows[frame.arrays.row.item()]
        passes = [costs.passes(kind, Cut(count)) for kind, count in zip((0, 1), samples, strict=True)]
        assert (passes[1].forward_s > passes[0].forward_s).all()
        np.testing.assert_array_equal(rows[:, c.FORWARD], passes[1].forward_s)
        for how in range(3):
            slowest = np.maximum(*(one.backward_s + one.again_s[how] for one in passes))
            np.testing.assert_array_equal(rows[:, c.BACKWARD + how], slowest)
            np.testing.assert_array_equal(rows[:, c.KEPT + how], np.maximum(*(one.kept_bytes[how] for one in passes)))


def test_copies_of_a_tied_weight_on_one_place_count_once():
    """Blocks 0, 2, 3 and 5 hold it; the first place has three of them, the second one."""
    _, packer = packed(FOUR, ties=(Tie((0, 2, 3, 5), 100, 50, 200),))
    loop = plain_draft((0, 1, 2, 4, 6), [Mesh((0,)), Mesh((1,))], [0, 1, 0, 1], microbatches=(4,), schedule="looped_bfs")
    whole = plain_draft((0, 6), [Mesh((0,))])
    for draft, blocks in ((loop, [2, 3]), (whole, [2, 3, 5])):
        ties = packer.ties(packer.frame(draft), draft)
        assert ties.block.tolist() == blocks and ties.again_bytes.tolist() == [[100.0, 50.0, 200.0]] * len(blocks)
    assert packer.ties(packer.frame(loop), loop).places.tolist() == [0, 1]


def test_a_tie_is_summed_at_the_size_of_its_largest_part():
    """One place shares it over two devices, the other has it whole, and it is summed whole."""
    costs, _ = packed(FOUR, ties=(Tie((0, 5), 1 << 26, 1 << 26, 0),), item=1.0)
    for places in ([Mesh((0, 1), shard=2, sharding=1), Mesh((2,))], [Mesh((2,)), Mesh((0, 1), shard=2, sharding=1)]):
        draft = plain_draft((0, 3, 6), places, microbatches=(4,), schedule="1f1b")
        ((seconds, involved),) = tie_exchanges(draft, costs, ClusterTraffic(FOUR))
        first = tuple(place.devices[0] for place in places)
        assert involved == (0, 1) and seconds == pytest.approx(collective_s(FOUR.links, "all_reduce", first, SIZE))
    assert set(borders(draft)) == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    "text",
    [
        "h100:16x8",
        "t4:32x2,eth=100g",
        "v100:9x8,ib=2x100g",
        "h100:16x8,pod=4@800g",
        "a100-80g:8x8+l4:32x2",
        "h100:128x8",
        "t4:350x2,eth=100g",
        "v100:96x8,ib=2x100g",
        "a100-80g:96x8,pod=4@800g",
    ],
)
def test_what_repeats_along_a_run_of_hosts_is_looked_at_once(text, monkeypatch):
    """Tables, ways and shared channels of all devices and of every half and quarter, in groups of few devices and of all."""
    cluster = Cluster.preset(text)
    count = cluster.num_devices

    def seen():
        traffic, found = ClusterTraffic(cluster), []
        parts = [
            tuple(range(begin, begin + count // n)) for n in (1, 2, 4) for begin in range(0, count - count // n + 1, count // n)
        ]
        parts.append(tuple(range(1, count // 2 + 1)))
        for devices in parts:
            for tensor in (1, 2, 8):
                if len(devices) % (2 * tensor):
                    continue
                for copies in (1, 2, len(devices) // tensor // 2):
                    place = Mesh(devices, copies, len(devices) // copies // tensor, tensor=tensor, sharding=1)
                    groups = tensor_groups(place, 0), share_groups(place), copy_groups(place)
                    found += [traffic.table(kind, own).tolist() for own in groups for kind in ("all_reduce", "all_gather")]
                    found.append(traffic.meets(place))
        for n in (2, 4):
            width = count // n
            places = [Mesh(tuple(range(start, start + width)), replicate=width) for start in range(0, width * n, width)]
            ways = traffic.ways(borders(plain_draft(tuple(range(n + 1)), places, schedule="gpipe")))
            found += [(way.latency_s, way.s_per_byte, way.part) for way in ways.values()]
            found.append([set(one.channels) & set(other.channels) != set() for one in ways.values() for other in ways.values()])
        return found

    once = seen()
    monkeypatch.setattr(type(cluster.links), "run", lambda links, first, last: None)
    assert [pytest.approx(row, rel=1e-12) for row in once] == seen()
