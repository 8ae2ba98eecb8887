"""Topologies lowered to channels: rates, lanes, and that leaving channels out changes no conflict."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster import Cluster
from rlplace.cluster.interconnect import build_topology, parse_network
from rlplace.cluster.parse import default_host
from rlplace.cluster.topology import MAX_LANES, Resource, Topology, TransferPath, lower
from rlplace.errors import InputError


def conflicts(channels):
    """Pairs of pairs that cannot run together."""
    held = {(i, j): set(c) for i, row in enumerate(channels) for j, c in enumerate(row) if c}
    return {(a, b) for a in held for b in held if a < b and held[a] & held[b]}


def plain_channels(topology):
    """Applies the rules of the module docstring, one path and resource at a time, with nothing left out."""
    capacity = [r.bytes_per_s for r in topology.resources]
    rate = {}
    for pair, path in topology.paths.items():
        rate[pair] = min(
            path.efficiency * min(capacity[r] for r in path.over), *(capacity[r] / path.over.count(r) for r in path.over)
        )
    held = {pair: set() for pair in topology.paths}
    for r, limit in enumerate(capacity):
        users = sorted(pair for pair, path in topology.paths.items() if r in path.over)
        if limit == math.inf or not users:
            continue
        demand = max(rate[pair] * topology.paths[pair].over.count(r) for pair in users)
        lanes = math.floor(limit / demand + 0.1)
        senders, receivers = sorted({i for i, _ in users}), sorted({j for _, j in users})
        side = int(len(receivers) > len(senders))
        choosers = (senders, receivers)[side]
        lanes = max(1, min(lanes, len(choosers), MAX_LANES))
        for pair in users:
            held[pair].add((r, choosers.index(pair[side]) % lanes))
    return {(a, b) for a in held for b in held if a < b and held[a] & held[b]}


@st.composite
def topologies(draw):
    count = draw(st.integers(2, 5))
    rates = st.sampled_from([1e9, 2e9, 3e9, 8e9, math.inf])
    shared = [Resource(f"r{k}", draw(rates), draw(st.sampled_from([0.0, 1e-6]))) for k in range(draw(st.integers(0, 4)))]
    port = st.sampled_from([1e9, 2e9, 4e9])
    ports = [Resource(f"{way}{d}", draw(port)) for d in range(count) for way in ("out", "in")]
    base = len(shared)
    paths = {}
    for i in range(count):
        for j in range(count):
            if i != j and draw(st.integers(0, 9)):
                middle = draw(st.lists(st.integers(0, base - 1), max_size=3)) if base else []
                over = (base + 2 * i, *middle, base + 2 * j + 1)
                paths[i, j] = TransferPath(over, 1e-5, draw(st.sampled_from([1.0, 0.5])))
    return Topology(count, (*shared, *ports), paths)


@settings(max_examples=150)
@given(topologies())
def test_left_out_channels_change_no_conflict(topology):
    links = lower(topology)
    assert conflicts(links.channels) == plain_channels(topology)
    for (i, j), path in topology.paths.items():
        capacity = [topology.resources[r].bytes_per_s for r in path.over]
        lone = path.efficiency * min(capacity)
        assert 0.9 * min(lone, *(c / path.over.count(r) for c, r in zip(capacity, path.over, strict=True))) <= (
            links.bandwidth_bytes_per_s[i, j] * (1 + 1e-9)
        )
        assert links.bandwidth_bytes_per_s[i, j] <= lone
        assert len(links.channels[i][j]) >= 2


@pytest.mark.parametrize("text", ["v100:8", "a100-80g:2x8,pcie", "rtx4090:8", "cpu:1+a100-80g:4", "h100:2x4", "t4:2x4,eth=10g"])
def test_presets_keep_every_conflict_of_their_topology(text):
    cluster = Cluster.preset(text)
    terms = {kind.name: default_host(kind) for kind in cluster.kinds}
    hosts = [terms[cluster.kinds[cluster.hosts.index(h)].name] for h in range(max(cluster.hosts) + 1)]
    if "pcie" in text:
        hosts = [type(host)("pcie", host.network) for host in hosts]
    if "eth" in text:
        hosts = [type(host)(host.fabric, parse_network("eth=10g")) for host in hosts]
    topology = build_topology(cluster.kinds, cluster.hosts, hosts)
    assert conflicts(cluster.links.channels) == plain_channels(topology)


def test_a_wide_bus_is_lanes_and_a_switch_is_nothing():
    ports = [Resource(f"p{k}", 10e9) for k in range(8)]
    wide = Topology(
        8,
        (*ports, Resource("bus", 31e9), Resource("switch", latency_s=1e-6)),
        {(i, i + 4): TransferPath((i, 8, 9, i + 4), 2e-6) for i in range(4)},
    )
    links = lower(wide)
    held = [set(links.channels[i][i + 4]) for i in range(4)]
    together = sum(a.isdisjoint(b) for k, a in enumerate(held) for b in held[:k])
    assert together == 5  # three lanes for four pairs: one of the six pairs of transfers shares a lane
    assert links.latency_s[0, 4] == pytest.approx(3e-6)
    assert links.bandwidth_bytes_per_s[0, 4] == 10e9
    nearly = Topology(8, (*ports, Resource("bus", 19.5e9)), {(i, i + 4): TransferPath((i, 8, i + 4)) for i in range(4)})
    assert lower(nearly).bandwidth_bytes_per_s[0, 4] == 19.5e9 / 2  # a second lane for a twentieth of the rate


def test_staged_copies_cross_host_memory_twice():
    cards = [Resource("a", 10e9), Resource("b", 10e9)]
    fast = lower(Topology(2, (*cards, Resource("memory", 100e9)), {(0, 1): TransferPath((0, 2, 2, 1), 0.0, 0.5)}))
    slow = lower(Topology(2, (*cards, Resource("memory", 6e9)), {(0, 1): TransferPath((0, 2, 2, 1), 0.0, 0.5)}))
    assert fast.bandwidth_bytes_per_s[0, 1] == 5e9
    assert slow.bandwidth_bytes_per_s[0, 1] == 3e9


def test_every_host_of_eight_cards_sends_on_all_of_them():
    links = Cluster.preset("h100:2x8").links
    rails = [set(links.channels[i][8 + i]) for i in range(8)]
    assert all(rails[i].isdisjoint(rails[j]) for i in range(8) for j in range(i))
    one = Cluster.preset("h100:2x8,ib=400g").links
    assert set(one.channels[0][8]) & set(one.channels[7][15])
    assert Cluster.preset("h100:2x8,ib=8x400g").fingerprint == Cluster.preset("h100:2x8").fingerprint
    assert parse_network("ib=8x200g").cards == 8


def test_pcie_switches_and_sockets():
    links = Cluster.preset("a100-80g:8,pcie").links
    pair = [set(links.channels[i][j]) for i, j in ((0, 2), (1, 3))]
    assert pair[0] & pair[1]  # devices 0 and 1 share the uplink of their switch
    assert set(links.channels[0][1]).isdisjoint(links.channels[2][3])
    assert links.bandwidth_bytes_per_s[0, 4] < links.bandwidth_bytes_per_s[0, 2]  # another socket
    separate = Cluster.preset("l4:8").links
    assert set(separate.channels[0][1]).isdisjoint(separate.channels[2][3])  # a root complex is no bottleneck


def test_processor_feeds_several_devices_at_once():
    links = Cluster.preset("l4:4+cpu:1").links
    assert set(links.channels[4][0]).isdisjoint(links.channels[4][1])


def test_nothing_to_lower():
    links = lower(Topology(1, (), {}))
    assert links.channels == (((),),)
    assert not np.any(links.bandwidth_bytes_per_s)


HEAD = 'format = "rlplace.cluster"\nversion = 1\n'
DEVICES = "".join(f'[[device]]\nname = "g{i}"\nkind = "l4"\n' for i in range(3))
TOPOLOGY = """
[topology]
[[topology.resource]]
name = "{device} out"
each = "*"
bytes_per_s = 20e9
[[topology.resource]]
name = "{device} in"
each = ["g0", "g1", "g2"]
bytes_per_s = 20e9
[[topology.resource]]
name = "bridge"
bytes_per_s = 5e9
latency_s = 1e-6
[[topology.path]]
from = "*"
to = "*"
over = ["{from} out", "{to} in"]
latency_s = 1e-5
[[topology.path]]
from = ["g0", "g1"]
to = "g2"
over = ["{from} out", "bridge", "{to} in"]
latency_s = 2e-5
efficiency = 0.5
"""


def load(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    return Cluster.load(tmp_path / "c.toml")


def test_topology_in_a_cluster_file(tmp_path):
    links = load(tmp_path, HEAD + DEVICES + TOPOLOGY).links
    assert links.bandwidth_bytes_per_s.tolist() == [[0, 20e9, 2.5e9], [20e9, 0, 2.5e9], [20e9, 20e9, 0]]
    assert links.latency_s[0, 2] == pytest.approx(2.1e-5)
    assert set(links.channels[0][1]).isdisjoint(links.channels[1][0])
    assert set(links.channels[0][2]).isdisjoint(links.channels[1][2])  # two transfers at half of it share the bridge
    whole = load(tmp_path, HEAD + DEVICES + TOPOLOGY.replace("efficiency = 0.5", "")).links
    assert set(whole.channels[0][2]) & set(whole.channels[1][2])
    again = tmp_path / "d.toml"
    Cluster.load(tmp_path / "c.toml").save(again)
    assert Cluster.load(again).fingerprint == Cluster.load(tmp_path / "c.toml").fingerprint


def test_a_path_that_nothing_limits_is_refused(tmp_path):
    endless = TOPOLOGY.replace("bytes_per_s = 5e9", "").replace('"{from} out", "bridge", "{to} in"', '"bridge"')
    with pytest.raises(InputError, match=r"topology.path\[1\].over: crosses nothing with a capacity"):
        load(tmp_path, HEAD + DEVICES + endless)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("bytes_per_s = 5e9", "bytes_per_s = 0", r"resource\[2\].bytes_per_s: expected a number in 0.001..1e\+18, found 0"),
        ("bytes_per_s = 5e9", "bytes_per_s = inf", r"resource\[2\].bytes_per_s: expected a number in 0.001..1e\+18, found inf"),
        ("bytes_per_s = 5e9", "bytes_per_sec = 5e9", "did you mean 'bytes_per_s'"),
        ('"bridge", ', '"bridg", ', "did you mean 'bridge'"),
        ('to = "g2"', 'to = "g9"', "did you mean"),
        ('to = "g2"', "to = [4]", r"path\[1\].to.*expected text, found 4"),
        ('name = "{device} out"', 'name = "out"', "needs {device}"),
        ('over = ["{from} out", "{to} in"]', "over = []", r"path\[0\].over: expected a list of 1 or more, found \[\]"),
        ("efficiency = 0.5", "efficiency = 0", r"path\[1\].efficiency: expected a number above 0, up to 1, found 0"),
        ("latency_s = 2e-5", "latency_s = -1", r"path\[1\].latency_s: expected a number in 0..1e\+09, found -1"),
        ("latency_s = 2e-5", 'latency_s = "long"', r"path\[1\].latency_s: expected a number.*found 'long'"),
        ("bytes_per_s = 5e9", "bytes_per_s = nan", r"resource\[2\].bytes_per_s: expected a number"),
        ('name = "bridge"', 'name = "g0 in"', "'g0 in': names must be unique"),
        ('name = "bridge"', 'name = ""', r"resource\[2\].name: expected text that is not empty"),
        ("latency_s = 1e-6", "latency_s = -1.0", r"resource\[2\].latency_s: expected a number in 0"),
        ("efficiency = 0.5", "efficiency = 2.0", r"path\[1\].efficiency: expected a number above 0, up to 1"),
        ("[topology]", "[interconnect]\n[topology]", "not both"),
    ],
)
def test_wrong_topology_files_are_refused_in_one_line(tmp_path, old, new, says):
    assert old in TOPOLOGY
    with pytest.raises(InputError, match=says) as caught:
        load(tmp_path, HEAD + DEVICES + TOPOLOGY.replace(old, new))
    assert "\n" not in str(caught.value)
