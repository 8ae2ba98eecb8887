"""From link times to clusters, without processes; and the whole verb on two processes of this machine."""

import json

import numpy as np
import pytest

from rlplace.cli.main import main
from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.cluster.machines import TIMED_COLLECTIVES, LinkTimes, cluster_from, fit_pairs
from rlplace.errors import InputError, MissingError
from rlplace.measure.links import group_ranks, measure_links
from tests.runtime.job.launch import forked

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
GROUP_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)


def link_times(hosts=("a", "a", "a", "b", "b", "b"), driver="NVIDIA A100-SXM4-80GB", cores=0, memory=85_000_000_000):
    """Times of an ideal cluster: 10 us and 100 GB/s inside a host, 30 us and 10 GB/s between hosts."""
    count = len(hosts)
    same = np.array([[a == b for b in hosts] for a in hosts])
    size = np.array(SIZES, dtype=np.float64)
    pair_s = np.where(same[..., None], 1e-5 + size / 100e9, 3e-5 + size / 10e9)
    pair_s[np.arange(count), np.arange(count)] = 0
    groups = group_ranks(hosts)
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1.5, "all_to_all": 0.5}
    group_s = np.array(
        [
            [[1e-5 * len(g) + rounds[kind] * (len(g) - 1) / len(g) * s / 80e9 for s in GROUP_SIZES] for g in groups]
            for kind in TIMED_COLLECTIVES
        ]
    )
    memories = (memory,) * count if isinstance(memory, int) else memory
    return LinkTimes(
        "nccl", tuple(hosts), (driver,) * count, memories, (cores,) * count, SIZES, pair_s, groups, GROUP_SIZES, group_s
    )


def test_groups_are_prefixes_of_hosts_and_everybody():
    assert group_ranks(["a"] * 8) == ((0, 1), (0, 1, 2, 3), tuple(range(8)))
    assert group_ranks(["a", "a", "a"]) == ((0, 1), (0, 1, 2))
    assert group_ranks(["a", "b", "a", "b"]) == ((0, 2), (1, 3), (0, 1, 2, 3))
    assert group_ranks(["a", "b"]) == ((0, 1),)
    assert group_ranks(["a", "b", "c", "d"]) == ((0, 1), (0, 1, 2, 3))


def test_ideal_times_give_their_own_latency_and_bandwidth(tmp_path):
    times = link_times()
    cluster = cluster_from(times)
    assert cluster.hosts == (0, 0, 0, 1, 1, 1)
    assert [d.kind for d in cluster.devices] == ["a100-80g"] * 6
    assert cluster.links.bandwidth_bytes_per_s[0, 1] == pytest.approx(100e9)
    assert cluster.links.latency_s[0, 1] == pytest.approx(1e-5)
    assert cluster.links.bandwidth_bytes_per_s[0, 3] == pytest.approx(10e9)
    assert cluster.links.latency_s[0, 3] == pytest.approx(3e-5)
    assert fit_pairs(times)[2].max() < 1e-9
    assert [f.devices for f in cluster.links.fabrics] == [(0, 1, 2), (3, 4, 5), (0, 1, 2, 3, 4, 5)]
    assert {f.basis for f in cluster.links.fabrics} == {"measured"}
    for kind, by_group in zip(TIMED_COLLECTIVES, times.group_s, strict=True):
        for ranks, seconds in zip(times.groups, by_group, strict=True):
            found = collective_s(cluster.links, kind, ranks, np.array(GROUP_SIZES, dtype=np.float64))
            assert found == pytest.approx(seconds, rel=1e-6)
    cluster.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml").fingerprint == cluster.fingerprint


def test_processes_on_processors_share_their_host():
    cluster = cluster_from(link_times(hosts=("a", "a"), driver="cpu", cores=4, memory=8_000_000_000))
    assert [d.name for d in cluster.devices] == ["cpu0", "cpu1"]
    assert cluster.devices[0].memory_bytes == 8_000_000_000


def test_equal_names_of_different_devices_become_kinds_of_their_own():
    cluster = cluster_from(link_times(hosts=("a", "b"), memory=(85_000_000_000, 84_000_000_000)))
    assert [d.kind for d in cluster.devices] == ["a100-80g", "a100-80g-2"]


def test_unknown_devices_are_refused():
    with pytest.raises(MissingError, match="has no preset"):
        cluster_from(link_times(driver="NVIDIA B9000"))
    with pytest.raises(MissingError, match="memory is unknown"):
        cluster_from(link_times(driver="cpu", cores=2, memory=0))


def test_outside_torchrun_it_says_how(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    code = main(["measure", "--links", "--out", str(tmp_path / "c.toml")])
    err = capsys.readouterr().err
    assert code == 4
    assert err.count("\n") == 1 and "torchrun --nproc-per-node" in err
    assert main(["measure", "--links", "--out", str(tmp_path / "none" / "c.toml")]) == 2


def test_one_process_has_no_links(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="at least two"):
        measure_links()


@pytest.mark.slow
def test_two_processes_of_this_machine(tmp_path):
    out = tmp_path / "c.toml"
    words = ["measure", "--links", "--out", out, "--time-limit", "2", "--repeats", "3", "--json"]
    code, printed, err = forked(2, "-m", "rlplace", *words)
    assert code == 0, err
    facts = json.loads("".join(printed))
    assert facts["backend"] == "gloo"
    assert [(p["from"], p["to"]) for p in facts["pairs"]] == [("cpu0", "cpu1"), ("cpu1", "cpu0")]
    assert all(0 < s < 10 for p in facts["pairs"] for s in p["seconds"])
    cluster = Cluster.load(out)
    assert (cluster.links.bandwidth_bytes_per_s[~np.eye(2, dtype=bool)] > 1e6).all()
    (fabric,) = cluster.links.fabrics
    assert fabric.devices == (0, 1) and [curve.kind for curve in fabric.curves] == list(TIMED_COLLECTIVES)
    assert "pairs from device 0 of 2" in err
    model = "hf:gpt2,n_layer=1,n_embd=32,n_head=2,vocab_size=64"
    assert main(["place", model, "--seq", "8", "--cluster", str(out), "--planner", "best", "--json"]) == 0


def test_a_failing_rank_says_who_and_why_in_one_line(monkeypatch, capsys, tmp_path):
    from rlplace.measure import links as module

    def refuse(*args, **kwargs):
        raise RuntimeError("connection refused by the other side\nframe #0: somewhere native\nframe #1: deeper")

    for name, value in {"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "start_group", refuse)
    code = main(["measure", "--links", "--out", str(tmp_path / "c.toml")])
    captured = capsys.readouterr()
    assert code == 1 and captured.out == ""
    assert captured.err.count("\n") == 1
    assert "rank 3 on " in captured.err and "connection refused" in captured.err and "frame" not in captured.err
