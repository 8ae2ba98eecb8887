import numpy as np
import pytest

from rlplace.cluster import KINDS, Cluster, parse
from rlplace.cluster.interconnect import parse_network
from rlplace.errors import InputError


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_preset_builds_and_links_every_pair(kind):
    cluster = Cluster.preset(f"{kind}:2x2")
    assert cluster.num_devices == 4
    assert cluster.hosts == (0, 0, 1, 1)
    assert len({d.name for d in cluster.devices}) == 4
    off = ~np.eye(4, dtype=bool)
    assert (cluster.links.bandwidth_bytes_per_s[off] > 0).all()
    assert (cluster.links.latency_s[off] > 0).all()
    assert all(d.memory_bytes > d.reserved_bytes for d in cluster.devices)


def test_every_transfer_holds_a_port_of_the_sender_and_one_of_the_receiver():
    for text in ("a100-80g:4", "v100:8", "rtx4090:4", "h100:2x2", "mi300x:3", "cpu:2+l4:2"):
        channels = Cluster.preset(text).links.channels
        count = len(channels)
        for i in range(count):
            for j in range(count):
                if i == j:
                    assert channels[i][j] == ()
                    continue
                assert len(channels[i][j]) >= 2
                # The opposite direction shares nothing but a host's bus: both ends' ports are one-way.
                assert channels[i][j][0] not in channels[j][i]
                assert channels[i][j][-1] not in channels[j][i]


def test_switch_ports_are_shared_by_all_peers_and_cube_links_are_not():
    switch = Cluster.preset("a100-80g:4").links.channels
    assert switch[0][1][0] == switch[0][2][0]
    assert switch[1][0][-1] == switch[2][0][-1]
    cube = Cluster.preset("v100:4").links
    assert set(cube.channels[0][1]).isdisjoint(cube.channels[0][2])
    assert cube.bandwidth_bytes_per_s[0, 3] == 2 * cube.bandwidth_bytes_per_s[0, 1]


def test_v100_cube_mesh_is_symmetric_with_six_links_each_and_pcie_for_the_rest():
    links = Cluster.preset("v100:8").links
    bandwidth = links.bandwidth_bytes_per_s
    assert np.array_equal(bandwidth, bandwidth.T)
    nvlink = np.where(bandwidth >= 22.6e9, bandwidth / 22.6e9, 0.0)
    assert np.array_equal(nvlink.sum(axis=1), np.full(8, 6.0))
    assert bandwidth[0, 7] < bandwidth[0, 1]


def test_host_network_card_is_one_channel_per_host_and_direction():
    channels = Cluster.preset("h100:2x4,ib=400g").links.channels
    outgoing = set(channels[0][4]) & set(channels[1][5])
    assert len(outgoing) == 2  # host 0's card out, host 1's card in
    assert set(channels[0][4]).isdisjoint(channels[4][0])


def test_options_change_the_links():
    base, pcie = Cluster.preset("a100-80g:2"), Cluster.preset("a100-80g:2,pcie")
    assert pcie.links.bandwidth_bytes_per_s[0, 1] < base.links.bandwidth_bytes_per_s[0, 1] / 5
    slow, fast = Cluster.preset("h100:2x1,eth=25g"), Cluster.preset("h100:2x1,ib=400g")
    assert slow.links.bandwidth_bytes_per_s[0, 1] == pytest.approx(25e9 / 8 * 0.85)
    assert fast.links.bandwidth_bytes_per_s[0, 1] == pytest.approx(400e9 / 8 * 0.88)
    assert slow.links.latency_s[0, 1] > fast.links.latency_s[0, 1]


def test_cards_without_peer_copies_are_staged_over_the_shared_bus():
    staged = Cluster.preset("rtx4090:2").links
    direct = Cluster.preset("l4:2").links
    assert staged.bandwidth_bytes_per_s[0, 1] == direct.bandwidth_bytes_per_s[0, 1] / 2
    wide = Cluster.preset("rtx4090:8").links.channels
    assert set(wide[0][1]) & set(wide[2][3])  # one socket, one bus
    assert set(wide[0][1]).isdisjoint(wide[4][5])  # the other socket's bus


def test_terms_are_hosts_and_processors_join_the_accelerators_host():
    mixed = Cluster.preset("a100-80g:4+v100:4")
    assert mixed.hosts == (0, 0, 0, 0, 1, 1, 1, 1)
    assert [d.kind for d in mixed.devices] == ["a100-80g"] * 4 + ["v100"] * 4
    with_cpu = Cluster.preset("cpu:1+a100-80g:2")
    assert with_cpu.hosts == (0, 0, 0)
    assert [d.name for d in with_cpu.devices] == ["gpu0", "gpu1", "cpu0"]


def test_communication_buffers_are_reserved_only_where_there_are_peers():
    alone, pair = Cluster.preset("a100-80g:1"), Cluster.preset("a100-80g:2")
    kind = KINDS["a100-80g"]
    assert alone.devices[0].reserved_bytes == kind.reserved_bytes
    assert pair.devices[0].reserved_bytes == kind.reserved_bytes + kind.communication_bytes


@pytest.mark.parametrize(
    "text, says",
    [
        ("a100-80:4", "did you mean 'a100-80g'"),
        ("nonsense:4", "known:"),
        ("a100-80g", "expected KIND:COUNT"),
        ("a100-80g:", "expected KIND:COUNT"),
        ("a100-80g:0", "at least one host and one device"),
        ("a100-80g:0x4", "at least one host and one device"),
        ("a100-80g:-3", "expected KIND:COUNT"),
        ("a100-80g:2x2x2", "expected KIND:COUNT"),
        ("a100-80g:4,", "unknown cluster option"),
        ("a100-80g:4,nvlnk", "did you mean 'nvlink'"),
        ("l4:4,nvlink", "has no NVLink"),
        ("l4:4,eth=fast", "not of the form"),
        ("l4:4,ib=0g", "not of the form"),
        ("l4:4+", "unknown cluster preset"),
        ("", "unknown cluster preset"),
        ("host:2", "stands alone"),
        ("a100-80g:999999", "the limit is"),
    ],
)
def test_bad_text_is_one_line(text, says):
    with pytest.raises(InputError, match=says.replace("(", r"\(")) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_network_text():
    assert parse_network("ib=200g").bytes_per_s == pytest.approx(22e9)
    assert parse_network("ETH=2.5g").bits_per_s == 2.5e9


def test_equal_clusters_have_equal_fingerprints():
    assert Cluster.preset("l4:2").fingerprint == Cluster.preset("l4:1x2").fingerprint
    assert Cluster.preset("l4:2").fingerprint != Cluster.preset("l4:3").fingerprint
    assert Cluster.preset("l4:2").fingerprint != Cluster.preset("t4:2").fingerprint
