"""Times of collectives: formulas by hand, published anchors, monotone, across fabrics, and the channels that they hold."""

import dataclasses
import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import HOP_LATENCY_SHARE, collective_s, contention
from rlplace.cluster.fabric import COLLECTIVES, CollectiveCurve, Fabric, Piece, bus_factor, joined_curve
from rlplace.cluster.links import Links
from rlplace.cluster.rings import ring_order
from rlplace.errors import InputError

GIB = 1 << 30
MIB = 1 << 20


def uniform(count, bandwidth=1e9, latency=3e-6):
    return Links(np.full((count, count), bandwidth), np.full((count, count), latency))


def bus_bandwidth(text, kind, devices, size=8 * GIB):
    links = Cluster.preset(text).links
    devices = list(devices)
    return bus_factor(kind, len(devices)) * size / collective_s(links, kind, devices, size)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_device_takes_no_time(kind):
    assert collective_s(uniform(3), kind, [1], 1e9) == 0.0


def test_ring_by_hand():
    links = uniform(4)
    hop = HOP_LATENCY_SHARE * 3e-6
    size = 4e9  # large enough that the ring beats the tree
    assert collective_s(links, "all_reduce", range(4), size) == pytest.approx(3e-6 + 5 * hop + 2 * 3 / 4 * size / 1e9)
    assert collective_s(links, "all_gather", range(4), size) == pytest.approx(3e-6 + 2 * hop + 3 / 4 * size / 1e9)
    assert collective_s(links, "reduce_scatter", range(4), size) == pytest.approx(3e-6 + 2 * hop + 3 / 4 * size / 1e9)
    assert collective_s(links, "broadcast", range(4), size) == pytest.approx(3e-6 + 2 * hop + size / 1e9)
    # every pair has its own channel: the quarters for the three peers move side by side
    assert collective_s(links, "all_to_all", range(4), size) == pytest.approx(3e-6 + 2 * hop + size / 4 / 1e9)
    assert collective_s(links, "all_reduce", [0, 2], size) == pytest.approx(3e-6 + hop + size / 1e9)


@pytest.mark.parametrize(
    ("kind", "hops"),
    [("all_reduce", 4), ("all_gather", 3), ("reduce_scatter", 3), ("broadcast", 2), ("all_to_all", 3)],
)
def test_an_empty_message_takes_its_hops(kind, hops):
    """Of four devices: a launch and the further hops of the ring, of the tree (up and down, or once), or of all peers."""
    links = uniform(4, latency=3.0)
    assert collective_s(links, kind, range(4), 0) == pytest.approx(3.0 + (hops - 1) * HOP_LATENCY_SHARE * 3.0)


def test_groups_on_one_channel_slow_each_other():
    """Two rings of two devices: alone each puts both of its hops on the bus, together they put four there."""
    bus = tuple(tuple((0,) if i != j else () for j in range(4)) for i in range(4))
    shared = dataclasses.replace(uniform(4), channels=bus)
    assert contention(shared, [[0, 1], [2, 3]]) == pytest.approx(2.0)
    assert contention(shared, [[0, 1]]) == contention(uniform(4), [[0, 1], [2, 3]]) == 1.0


def test_a_piece_begins_with_its_first_size():
    curve = CollectiveCurve(2, (Piece(0.0, 1.0, 1.0), Piece(8.0, 5.0, 2.0)))
    assert curve.seconds(np.array([0.0, 7.0, 8.0, 10.0])).tolist() == [1.0, 8.0, 5.0 + 8.0 / 2, 5.0 + 10.0 / 2]


def test_tree_wins_for_small_messages_of_many_devices():
    links = uniform(64)
    ring = 3e-6 + (2 * 63 - 1) * HOP_LATENCY_SHARE * 3e-6
    tree = 3e-6 + (2 * 6 - 1) * HOP_LATENCY_SHARE * 3e-6
    assert collective_s(links, "all_reduce", range(64), 0) == pytest.approx(tree)
    assert tree < ring / 5
    large = collective_s(links, "all_reduce", range(64), 1e12)
    assert large == pytest.approx(ring + 2 * 63 / 64 * 1e3)


def test_shared_channels_count_as_often_as_a_ring_uses_them():
    count = 4
    one = tuple(tuple((0,) if i != j else () for j in range(count)) for i in range(count))
    shared = dataclasses.replace(uniform(count, latency=0.0), channels=one)
    assert collective_s(shared, "all_gather", range(4), 1e9) == pytest.approx(4 * 3 / 4)
    assert collective_s(shared, "all_to_all", range(4), 1e9) == pytest.approx(12 / 4)


def test_ring_goes_round_a_slow_pair():
    bandwidth = np.full((4, 4), 10e9)
    bandwidth[0, 1] = bandwidth[1, 0] = 1e9
    links = Links(bandwidth, np.zeros((4, 4)))
    order = ring_order(links, range(4))
    assert abs(order.index(0) - order.index(1)) == 2
    assert collective_s(links, "all_gather", range(4), 10e9) == pytest.approx(3 / 4)
    bandwidth = bandwidth.copy()
    bandwidth[:, 3] = 0
    assert collective_s(Links(bandwidth, np.zeros((4, 4))), "all_reduce", range(4), 1) == math.inf
    assert collective_s(Links(bandwidth, np.zeros((4, 4))), "all_reduce", range(3), 1) < math.inf


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(3, 7))
def test_short_rings_are_the_best_of_all_orders(seed, count):
    """Devices in groups of groups, as hosts and racks make them, or links at random, some of them missing."""
    rng = np.random.default_rng(seed)
    groups = np.stack([rng.integers(0, parts, count) for parts in (1, 2, 3)])
    shared = np.cumprod(groups[:, :, None] == groups[:, None], axis=0).sum(axis=0)
    rates = np.array([0.0, 1e9, 10e9, 100e9])[shared if seed % 3 else rng.integers(0, 4, (count, count))]
    links = Links(np.where(np.eye(count, dtype=bool), 0.0, rates), np.zeros((count, count)))

    def key(order):
        with np.errstate(divide="ignore"):
            hops = 1.0 / links.bandwidth_bytes_per_s[list(order), [*order[1:], order[0]]]
        return hops.max(), hops.sum()

    best = min(key((0, *order)) for order in itertools.permutations(range(1, count)))
    assert key(ring_order(links, range(count))) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("count", [9, 16])
def test_long_rings_visit_everybody(count):
    rng = np.random.default_rng(count)
    links = Links(rng.uniform(1e9, 9e9, (count, count)), np.zeros((count, count)))
    order = ring_order(links, range(count))
    assert sorted(order) == list(range(count))
    slowest = min(links.bandwidth_bytes_per_s[a, b] for a, b in zip(order, order[1:] + order[:1], strict=True))
    natural = min(links.bandwidth_bytes_per_s[a, (a + 1) % count] for a in range(count))
    assert slowest >= natural


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(COLLECTIVES), st.lists(st.floats(0, 1e11), min_size=2, max_size=6))
def test_larger_messages_never_take_less(seed, kind, sizes):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 10))
    links = random_links(rng, count)
    devices = rng.permutation(count)[: int(rng.integers(2, count + 1))].tolist()
    size = np.sort(np.array(sizes))
    times = collective_s(links, kind, devices, size)
    assert (times >= 0).all()
    assert (np.diff(times) >= -1e-12 * times[1:]).all()
    # Powers of arrays and of single numbers may differ in the last digit.
    assert [collective_s(links, kind, devices, float(s)) for s in size] == pytest.approx(times.tolist(), rel=1e-12)


def random_links(rng, count):
    half = count // 2
    fabrics = []
    for devices in (range(half), range(half, count)):
        if len(devices) > 1 and rng.random() < 0.7:
            rates = rng.uniform(1e8, 1e10, 2)
            stretches = ((0, rates[0]), (1e6, rates[1]))
            curves = tuple(joined_curve(n, 1e-5 * n, stretches) for n in (2, len(devices)) if n <= len(devices))
            fabrics.append(Fabric(tuple(devices), tuple({c.group_size: c for c in curves}.values())))
    return Links(rng.uniform(1e8, 1e10, (count, count)), rng.uniform(0, 1e-4, (count, count)), None, tuple(fabrics))


def test_inside_a_fabric_its_curve_holds():
    curves = (joined_curve(2, 1e-5, [(0, 1e9)]), joined_curve(4, 3e-5, [(0, 2e9), (1 << 20, 4e9)]))
    links = dataclasses.replace(uniform(6), fabrics=(Fabric((0, 1, 2, 3), curves),))
    assert collective_s(links, "all_reduce", [3, 1], 5e6) == pytest.approx(1e-5 + 5e6 / 1e9)
    size = 8 * MIB
    four = 3e-5 + 1.5 * MIB / 2e9 + 1.5 * 7 * MIB / 4e9
    assert collective_s(links, "all_reduce", range(4), size) == pytest.approx(four)
    # all-gather at the bus volume of an all-reduce of half the size
    assert collective_s(links, "all_gather", range(4), 2 * size) == pytest.approx(four)
    # three devices: between two and four at equal bus volume, by the logarithm of the size
    volume, part = 4 / 3 * size, math.log2(3 / 2)
    expected = (1e-5 + volume / 1e9) ** (1 - part) * (3e-5 + 1.5 * MIB / 2e9 + (volume - 1.5 * MIB) / 4e9) ** part
    assert collective_s(links, "all_reduce", [0, 1, 3], size) == pytest.approx(expected)
    # six devices: more than the fabric joins, so the links decide
    assert collective_s(links, "all_reduce", range(6), 1e12) == pytest.approx(5 / 3 * 1e3, rel=1e-3)


def test_own_curves_of_other_collectives_come_first():
    curves = (joined_curve(2, 1e-5, [(0, 1e9)]), joined_curve(2, 2e-5, [(0, 5e9)], kind="all_gather"))
    links = dataclasses.replace(uniform(2), fabrics=(Fabric((0, 1), curves),))
    assert collective_s(links, "all_gather", (0, 1), 1e9) == pytest.approx(2e-5 + 0.5 / 5)
    assert collective_s(links, "reduce_scatter", (0, 1), 1e9) == pytest.approx(2e-5 + 0.5 / 5)
    assert collective_s(links, "all_reduce", (0, 1), 1e9) == pytest.approx(1e-5 + 1)


def test_across_fabrics_in_phases_or_pipelined():
    inside = CollectiveCurve(4, (Piece(0, 0.0, 100e9),))
    host = [Fabric(tuple(range(4 * h, 4 * h + 4)), (inside,)) for h in range(2)]
    bandwidth = np.full((8, 8), 1e9)
    links = Links(bandwidth, np.zeros((8, 8)), None, tuple(host))
    size = 1e9
    # four rails of 1 GB/s each carry 2 (2-1)/2 of a quarter; inside 2 x 3/4 at 100 GB/s
    phases = size / 4 / 1e9 + 2 * 0.75 * size / 100e9
    assert collective_s(links, "all_reduce", range(8), size) == pytest.approx(phases)
    # without fabrics a single ring passes the slow links
    assert collective_s(Links(bandwidth, np.zeros((8, 8))), "all_reduce", range(8), size) == pytest.approx(1.75)
    # with a slow inside the pipelined ring hides the rails behind it
    slow = [msgspec.structs.replace(f, curves=(CollectiveCurve(4, (Piece(0, 0.0, 1e9),)),)) for f in host]
    wide = Links(np.full((8, 8), 50e9), np.zeros((8, 8)), None, tuple(slow))
    assert collective_s(wide, "all_gather", range(8), size) == pytest.approx(min(0.75 + 0.5 / 4 / 50, 7 / 8, 7 / 8 / 50))


def test_one_network_card_is_shared_by_all_rails():
    eight = collective_s(Cluster.preset("h100:2x8").links, "all_reduce", range(16), float(GIB))
    one = collective_s(Cluster.preset("h100:2x8,ib=400g").links, "all_reduce", range(16), float(GIB))
    assert one > 3 * eight
    # per host one tensor leaves and one enters over 44 GB/s, whatever the algorithm
    assert one > GIB / 44e9


@pytest.mark.parametrize(
    "text, kind, count, published, tolerance",
    [
        # ml-engineering, 8 GiB messages
        ("h200:8", "all_reduce", 4, 363e9, 0.03),
        ("h200:8", "all_reduce", 5, 414e9, 0.03),
        ("h200:8", "all_reduce", 8, 473e9, 0.03),
        ("h200:8", "all_gather", 8, 365e9, 0.03),
        ("mi300x:8", "all_reduce", 2, 47.7e9, 0.01),
        ("mi300x:8", "all_reduce", 8, 312.9e9, 0.01),
        # mean bus bandwidths of the vTrain tables from 8 MB up
        ("a100-80g:8", "all_reduce", 2, 194e9, 0.02),
        ("a100-80g:8", "all_reduce", 4, 220e9, 0.02),
        ("a100-80g:8", "all_reduce", 8, 228e9, 0.02),
        ("a100-80g:8", "all_reduce", 8, 235e9, 0.03),  # ml-engineering, another machine
        ("v100:8", "all_reduce", 2, 22.6e9, 0.01),
        ("v100:8", "all_reduce", 4, 85.5e9, 0.01),
        ("v100:8", "all_reduce", 8, 135.8e9, 0.01),
    ],
)
def test_published_bus_bandwidths(text, kind, count, published, tolerance):
    assert bus_bandwidth(text, kind, range(count)) == pytest.approx(published, rel=tolerance)


def test_cube_mesh_bandwidth_depends_on_who_talks():
    single, double = bus_bandwidth("v100:8", "all_reduce", (0, 1)), bus_bandwidth("v100:8", "all_reduce", (0, 3))
    assert double == pytest.approx(2 * single, rel=0.01)
    assert bus_bandwidth("v100:8", "all_reduce", (0, 7)) < 0.5 * single  # no NVLink: PCIe
    assert bus_bandwidth("v100:8", "all_reduce", (0, 1, 6, 7)) < 0.5 * single  # two pairs without a link between them
    assert bus_bandwidth("v100:8", "all_reduce", (4, 5, 6, 7)) == pytest.approx(
        bus_bandwidth("v100:8", "all_reduce", (0, 1, 2, 3))
    )


def test_group_sizes_between_measured_ones():
    """The curve of four V100 from that of eight alone: 4 of 6 links; measured 85.5 GB/s."""
    links = Cluster.preset("v100:8").links
    fabric = msgspec.structs.replace(links.fabrics[0], curves=tuple(c for c in links.fabrics[0].curves if c.group_size != 4))
    links = dataclasses.replace(links.whole, fabrics=(fabric,))
    assert 1.5 * 8 * GIB / collective_s(links, "all_reduce", range(4), 8 * GIB) == (pytest.approx(85.5e9, rel=0.07))


@pytest.mark.parametrize(
    "kind, devices, size, says",
    [
        ("all_reduc", [0, 1], 1.0, "did you mean 'all_reduce'"),
        ("all_reduce", [0, 0], 1.0, "distinct"),
        ("all_reduce", [0, 9], 1.0, "distinct numbers in 0..2"),
        ("all_reduce", [], 1.0, "distinct"),
        ("all_reduce", [0, 1], -1.0, "negative"),
        ("all_reduce", [0, 1], math.nan, "negative or not a number"),
    ],
)
def test_wrong_arguments(kind, devices, size, says):
    with pytest.raises(InputError, match=says):
        collective_s(uniform(3), kind, devices, size)
