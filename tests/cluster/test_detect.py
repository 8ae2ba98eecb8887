from types import SimpleNamespace

import pytest

from rlplace.cluster import Cluster, parse
from rlplace.cluster import detect as module
from rlplace.errors import MissingError


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
    assert cluster.kinds[0].peak_flops["float32"] == 80e9 * module._usable_cores()


def test_nothing_usable(monkeypatch):
    fake_cuda(monkeypatch, [])
    monkeypatch.setattr(module, "_host_memory_bytes", lambda: 0)
    with pytest.raises(MissingError) as caught:
        Cluster.detect()
    assert caught.value.exit_code == 4
