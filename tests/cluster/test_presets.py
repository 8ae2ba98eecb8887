"""Preset clusters, and the cluster of this machine."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlplace.cluster import KINDS, Cluster, parse
from rlplace.cluster import machines as module
from rlplace.cluster.interconnect import parse_network
from rlplace.errors import InputError, MissingError


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


def fake_cuda(monkeypatch, names, memory=80_000_000_000, peers=True):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name=names[i], total_memory=memory), raising=False
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: peers, raising=False)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_driver_names(name, kind):
    found = module.kind_from_name(name, 77_000_000_000)
    assert found.name == kind
    assert found.memory_bytes == 77_000_000_000


def test_small_a100_is_told_from_large():
    assert module.kind_from_name("NVIDIA A100-SXM4-80GB", 85_000_000_000).name == "a100-80g"
    assert module.kind_from_name("NVIDIA A100-SXM4-40GB", 42_000_000_000).name == "a100-40g"


@pytest.mark.parametrize("name", ["NVIDIA L40S", "Quadro K2000", "NVIDIA L400"])
def test_unknown_device_says_what_to_do(name):
    with pytest.raises(MissingError, match="TOML"):
        module.kind_from_name(name, 1)


def test_accelerators_with_their_memory(monkeypatch):
    fake_cuda(monkeypatch, ["NVIDIA H100 80GB HBM3"] * 2, memory=79_000_000_000)
    cluster = Cluster.detect()
    assert [d.kind for d in cluster.devices] == ["h100", "h100"]
    assert cluster.devices[0].memory_bytes == 79_000_000_000
    assert cluster.links.bandwidth_bytes_per_s[0, 1] == 396e9
    assert cluster.text == "host"


def test_without_peer_access_copies_are_staged(monkeypatch):
    fake_cuda(monkeypatch, ["NVIDIA H100 PCIe"] * 2, peers=False)
    links = Cluster.detect().links
    assert links.bandwidth_bytes_per_s[0, 1] == 55e9 / 2


def test_processor_when_there_is_no_accelerator(monkeypatch):
    fake_cuda(monkeypatch, [])
    cluster = parse("host")
    assert [d.kind for d in cluster.devices] == ["cpu"]
    assert cluster.devices[0].memory_bytes > 1 << 28
    assert cluster.kinds[0].peak_flops["float32"] == 80e9 * module.usable_cores()


def test_nothing_usable(monkeypatch):
    fake_cuda(monkeypatch, [])
    monkeypatch.setattr(module, "host_processor", lambda: (1, 0))
    with pytest.raises(MissingError) as caught:
        Cluster.detect()
    assert caught.value.exit_code == 4
