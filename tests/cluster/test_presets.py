"""Preset clusters, and the cluster of this machine."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlplace.cluster import KINDS, Cluster, parse
from rlplace.cluster import machines as module
from rlplace.cluster.collectives import collective_s
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


# Processors, boost clock in MHz, FLOPs a clock of one processor in fp32 and half precision (NVIDIA's architecture whitepapers:
# 128 fp32 lanes, 64 on Turing; tensor cores with fp32 accumulation, at half rate on GeForce and some server cards).
CLOCKS = {
    "a10": (72, 1695, 256, 1024), "a10g": (80, 1710, 256, 512), "a6000": (84, 1800, 256, 1024), "l40": (142, 2490, 256, 512),
    "l40s": (142, 2520, 256, 1024), "rtx6000-ada": (142, 2505, 256, 1024), "rtx-pro-6000": (188, 2617, 256, 1024),
    "rtx5090": (170, 2407, 256, 512), "rtx5080": (84, 2617, 256, 512), "rtx4090": (128, 2520, 256, 512),
    "rtx4080": (76, 2505, 256, 512), "rtx3090": (82, 1695, 256, 512), "rtx3060": (28, 1777, 256, 512),
    "rtx2080ti": (68, 1635, 128, 512), "titan-rtx": (72, 1770, 128, 1024), "a800": (108, 1410, 128, 2048),
    "h800": (132, 1830, 256, 4096), "gh200": (132, 1830, 256, 4096), "h20": (78, 1830, None, 1024),
    "mi300x": (304, 2100, 256, 2048), "mi325x": (304, 2100, 256, 2048), "mi355x": (256, 2400, 256, 4096),
    "gaudi3": (8, 1600, None, 2 * 256 * 256),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOCKS)
def test_peaks_are_processors_times_clock_times_width(name):
    processors, mhz, single, half = CLOCKS[name]
    kind = KINDS[name]
    assert name == "gaudi3" or kind.processors == processors  # eight matrix engines beside 64 vector processors
    assert kind.peak_flops["float16" if "bfloat16" not in kind.peak_flops else "bfloat16"] == pytest.approx(
        processors * mhz * 1e6 * half, rel=0.02
    )
    if single is not None:
        assert kind.peak_flops["float32"] == pytest.approx(processors * mhz * 1e6 * single, rel=0.09)  # fp32 may clock higher


def test_capped_links_slow_collectives_by_their_rate():
    size = 1 << 33
    seconds = {
        name: collective_s(Cluster.preset(f"{name}:8").links, "all_reduce", range(8), size)
        for name in ("a100-80g", "a800", "h200", "h800", "b200")
    }
    assert seconds["a800"] / seconds["a100-80g"] == pytest.approx(300 / 200, rel=0.01)
    assert seconds["h800"] / seconds["h200"] == pytest.approx(450 / 200, rel=0.01)
    assert 2 * 7 / 8 * size / seconds["b200"] == pytest.approx(838e9, rel=0.03)  # published
    basis = {name: Cluster.preset(f"{name}:8").links.fabrics[0].basis for name in ("h200", "h800")}
    assert basis == {"h200": "fitted", "h800": "datasheet"}


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
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A800 80GB PCIe", "a800"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_driver_names(name, kind):
    found = module.kind_from_name(name, 77_000_000_000)
    assert found.name == kind
    assert found.memory_bytes == 77_000_000_000


def test_small_a100_is_told_from_large():
    assert module.kind_from_name("NVIDIA A100-SXM4-80GB", 85_000_000_000).name == "a100-80g"
    assert module.kind_from_name("NVIDIA A100-SXM4-40GB", 42_000_000_000).name == "a100-40g"


@pytest.mark.parametrize(
    "name",
    ["NVIDIA L4000", "Quadro K2000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3060 Ti", "Quadro RTX 6000"],
)
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
