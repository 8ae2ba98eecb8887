"""Links worked out by class of hosts equal those of the whole topology, and grow with unlike things alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s, contention
from rlplace.cluster.host_links import HostLinks
from rlplace.cluster.interconnect import Host, build_topology, parse_network
from rlplace.cluster.presets import KINDS
from rlplace.cluster.rings import exchange, sent_at_once
from rlplace.cluster.tiers import Tier, tiers_of
from rlplace.cluster.topology import lower
from rlplace.errors import InputError
from rlplace.limits import DEVICES

HOST_KINDS = ["h100", "a100-80g", "v100", "l4", "rtx4090", "t4", "mi300x", "cpu"]


@st.composite
def clusters(draw):
    """Hosts of up to three classes in any order, unlike kinds in one host, processors of a host at the end of the devices.

    Some in groups, of which some are in groups: alike ones and others, wide and narrow uplinks.
    """
    classes = draw(
        st.lists(
            st.tuples(
                st.lists(st.sampled_from(HOST_KINDS), min_size=1, max_size=9),
                st.sampled_from(["nvlink", "pcie"]),
                st.sampled_from(["eth=10g", "eth=400g", "ib=2x200g", "ib=8x400g"]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    rows = draw(st.lists(st.integers(0, len(classes) - 1), min_size=1, max_size=6))
    if draw(st.booleans()):  # groups that are alike
        rows = (rows * 12)[: draw(st.integers(8, 12))]
    tiers, sizes = [], draw(st.lists(st.integers(2, 4), max_size=3))
    for number in range(len(sizes)):
        hosts, rate = int(np.prod(sizes[: number + 1])), draw(st.sampled_from([1e9, 1e10, 5e10, 2e11, 1e15]))
        host = draw(st.integers(0, 2)) if number == 0 else tiers[0].host
        for start in range(host, len(rows) - hosts + 1, hosts * (1 + draw(st.booleans()))):  # others are in no group
            tiers.append(Tier(f"tier{number}", hosts, rate * draw(st.sampled_from([1, 1, 1, 3])), 1e-5, start, 1))
        if not tiers:
            break
    hosts = [Host(classes[row][1], parse_network(classes[row][2])) for row in rows]
    devices = [(KINDS[kind], host) for host, row in enumerate(rows) for kind in classes[row][0]]
    devices.sort(key=lambda device: device[0].host_processor and draw(st.booleans()))
    kinds, host_of = zip(*devices, strict=True)
    return kinds, host_of, hosts, tiers


@settings(max_examples=60, deadline=None)
@given(clusters())
def test_classes_of_hosts_give_the_links_of_the_whole_topology(cluster):
    *parts, tiers = cluster
    whole, found = lower(build_topology(*parts, tiers_of(tiers, len(parts[2])))), HostLinks(*cluster).whole
    assert np.array_equal(found.bandwidth_bytes_per_s, whole.bandwidth_bytes_per_s)
    assert np.array_equal(found.latency_s, whole.latency_s)
    assert found.channels == whole.channels


@pytest.mark.parametrize(
    "text",
    [
        "h100:4x8",
        "a100-80g:3x4+v100:2x8",
        "t4:5x2,eth=100g",
        "rtx4090:4x4,ib=2x100g",
        "h100:8x8,pod=2@1000g,region=4@100g@5ms",
        "t4:6x2,pod=3@50g+l4:2x4,eth=25g",
    ],
)
def test_groups_of_one_sort_take_equally_long_and_meet_as_all_do(text):
    cluster = Cluster.preset(text)
    wires, whole, count = cluster.links, cluster.links.whole, cluster.num_devices
    for size, stride in ((2, 1), (2, 2), (count // 4, 4), (4, 1)):
        span = size * stride
        groups = [
            tuple(range(start + offset, start + offset + span, stride))
            for start in range(0, count - span + 1, span)
            for offset in range(stride)
        ]
        each = [collective_s(whole, "all_reduce", group, 1e8) for group in groups]
        sorts = wires.sorts(np.array(groups))
        for number in set(sorts.tolist()):
            alike = [seconds for seconds, own in zip(each, sorts, strict=True) if own == number]
            first = groups[list(sorts).index(number)]
            assert alike == pytest.approx([collective_s(wires, "all_reduce", first, 1e8)] * len(alike))
        assert contention(wires, groups) == pytest.approx(contention(whole, groups))


@settings(max_examples=60, deadline=None)
@given(clusters(), st.data())
def test_all_to_alls_by_kinds_of_devices_take_what_all_pairs_take(cluster, data):
    wires = HostLinks(*cluster)
    count = wires.num_devices
    size = data.draw(st.integers(2, max(2, count)))
    order = data.draw(st.sampled_from([np.arange(count), np.random.default_rng(count).permutation(count)]))
    strided = data.draw(st.booleans())
    some = max(1, data.draw(st.integers(1, max(1, count // size))))
    if some * size > count:
        return
    members = order[: some * size]
    groups = members.reshape(size, some).T if strided else members.reshape(some, size)
    pairs = np.array([(a, b) for group in groups.tolist() for a in group for b in group if a != b]).T
    sent = sent_at_once(wires, *pairs)
    found = exchange(wires, groups)
    assert found[0] == (pytest.approx(sent.s_per_byte, rel=1e-12) if sent.s_per_byte < np.inf else np.inf)
    assert found[0] == np.inf or found[1] == sent.latency_s.max()


def test_an_all_to_all_of_all_devices_asks_for_no_pairs():
    """Every pod sends to all others over its uplink: of 16,384 devices 512 each to 15,872."""
    links, card = Cluster.preset("h100:2048x8,pod=64@12800g").links, 400e9 / 8 * 0.88
    assert exchange(links, np.arange(16384)[None])[0] == pytest.approx(512 * 15872 / (32 * card))
    rails = np.arange(16384).reshape(-1, 8).T
    assert exchange(links, rails)[0] == pytest.approx(64 * 8 * (2048 - 64) / (32 * card))
    assert contention(links, rails, exchanges=True) == pytest.approx(exchange(links, rails)[0] / exchange(links, rails[:1])[0])


@pytest.mark.parametrize(("text", "size", "stride"), [("h100:16x8,eth=400g,pod=4@1600g", 32, 4), ("a10:8x8,eth=100g", 8, 8)])
def test_all_to_alls_in_all_groups_take_what_the_busiest_channel_carries(text, size, stride):
    """Devices of one group choose few lanes of an uplink, those of all groups every one: what groups share is no multiple."""
    links = Cluster.preset(text).links
    groups = np.arange(links.num_devices).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)
    pairs = np.array([(a, b) for group in groups.tolist() for a in group for b in group if a != b]).T
    factor = contention(links, groups, exchanges=True)
    twice, once = (collective_s(links, "all_to_all", groups[0].tolist(), factor * sent) for sent in (2e9, 1e9))
    assert twice - once == pytest.approx(1e9 / size * sent_at_once(links, *pairs).s_per_byte, rel=1e-6)


@pytest.mark.parametrize(("uplink", "lanes"), [("400g", 1), ("1600g", 4), ("3200g", 8)])
def test_an_uplink_carries_what_all_groups_send_over_it(uplink, lanes):
    """Rings over all hosts cross every border of pods once, each; pairs of pods as often as they have devices."""
    links, card = Cluster.preset(f"h100:8x8,pod=4@{uplink}").links, 400e9 / 8 * 0.88
    rails = [tuple(range(local, 64, 8)) for local in range(8)]
    assert contention(links, rails) == pytest.approx(8 / lanes)
    twice, once = (collective_s(links, "all_reduce", rails[0], size) for size in (2e9, 1e9))
    assert twice - once == pytest.approx(2 * 7 / 8 * 1e9 / card, rel=1e-6)
    pairs = np.arange(32)
    assert sent_at_once(links, pairs, pairs + 32).s_per_byte == pytest.approx(32 / (lanes * card))
    assert sent_at_once(links, pairs[:8], pairs[:8] + 8).s_per_byte == pytest.approx(1 / card)  # inside of a pod


def test_quicker_links_of_hosts_are_quicker_links():
    wires = Cluster.preset("h100:3x8").links
    quick, whole = wires.quicker(2.0), wires.whole.quicker(2.0)
    assert np.array_equal(quick.whole.bandwidth_bytes_per_s, whole.bandwidth_bytes_per_s)
    assert quick.fabrics == whole.fabrics and quick.whole.channels == whole.channels
    assert np.array_equal(wires.quicker(2.0).quicker(0.5).whole.bandwidth_bytes_per_s, wires.whole.bandwidth_bytes_per_s)


def test_pairs_of_the_largest_cluster_are_those_of_a_small_one():
    large, small = Cluster.preset(f"h100:{DEVICES // 8}x8").links, Cluster.preset("h100:3x8").links
    pairs = [(0, 1), (0, 9), (3, 16), (23, 2)]
    far = [(i + 100_000 * (i > 7), j + 100_000 * (j > 7)) for i, j in pairs]
    for one, other in zip(large.rates(*zip(*far, strict=True)), small.rates(*zip(*pairs, strict=True)), strict=True):
        assert one.tolist() == other.tolist()
    held = large.held(*zip(*far, strict=True))
    assert [(row >= 0).sum() for row in held] == [(row >= 0).sum() for row in small.held(*zip(*pairs, strict=True))]
    with pytest.raises(InputError, match=r"131072 devices; placements and cluster files with all links .* at most 1024"):
        _ = large.whole


def test_a_large_cluster_has_a_small_file(tmp_path):
    cluster = Cluster.preset("h100:2048x8,pod=64@1.6t,region=512@100g@20ms,mem=512g+l4:3x4,eth=10g+cpu:2")
    cluster.save(tmp_path / "c.toml")
    again = Cluster.load(tmp_path / "c.toml")
    text = (tmp_path / "c.toml").read_text()
    assert (
        text.count("[[device]]") == 3 and text.count("[[host]]") == 2 and text.count("[[tier]]") == 2 and "[links]" not in text
    )
    assert again.devices == cluster.devices and again.hosts == cluster.hosts and again.fingerprint == cluster.fingerprint
    assert again.links.tiers == cluster.links.tiers
    rates = [one.links.rates([5, 5, 16384], [500, 16000, 16390]) for one in (again, cluster)]
    assert np.array_equal(rates[0], rates[1]) and rates[0][1].tolist() == pytest.approx([25e-6, 25e-6 + 20e-3, 50e-6])
    for old, new, says in (
        ("count = 2048", "count = 2047", "links of 2050 hosts for devices on 2051"),
        ("count = 16384", "count = 131073", r"device\[0\]: count: expected a whole number in 1..131072, found 131073"),
        ('name = "gpu0"', 'name = "gpu"', "needs a number at its end, for 16384 devices count on from it"),
    ):
        (tmp_path / "c.toml").write_text(text.replace(old, new, 1))
        with pytest.raises(InputError, match=says):
            Cluster.load(tmp_path / "c.toml")
