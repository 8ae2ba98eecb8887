"""Specifications of emulated hosts: hostile input, names, the cluster that they describe. Nothing here needs root."""

import math
import os

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.errors import InputError, MissingError
from tools.hosts import HostsSpec, cluster_of, commands, emulated_hosts, parse_cores, parse_rate, parse_rates
from tools.hosts.__main__ import main
from tools.hosts.cluster import PAYLOAD_FRACTION, cores_of
from tools.hosts.network import is_stale, new_prefix

PAIRS = ((0, 1e9, 5e7), (2e8, 0, 1e8), (1e9, 5e8, 0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hosts": 0}, "whole number from 1 to 32"),
        ({"hosts": 10**400}, "whole number from 1 to 32"),
        ({"hosts": True}, "whole number"),
        ({"hosts": 2.0}, "whole number"),
        ({"hosts": "2"}, "whole number"),
        ({"rate_bits_per_s": math.nan}, "not a finite"),
        ({"rate_bits_per_s": -1}, "outside"),
        ({"rate_bits_per_s": 0}, "outside"),
        ({"rate_bits_per_s": "1gbit"}, "expected a number"),
        ({"rate_bits_per_s": 10**400}, "too large"),
        ({"rate_bits_per_s": ((0, 1e9), (1e9,))}, "2 x 2 matrix"),
        ({"rate_bits_per_s": PAIRS}, "2 x 2 matrix"),
        ({"rate_bits_per_s": ((0, 0), (1e9, 0))}, r"rate_bits_per_s\[0\]\[1\]"),
        ({"rate_bits_per_s": ((1e9, 1e9), (1e9, 0))}, r"rate_bits_per_s\[0\]\[0\]"),
        ({"burst_bytes": 1}, "whole number from 2000"),
        ({"burst_bytes": 1e5}, "whole number"),
        ({"cpus": 0}, "one entry for each of 2"),
        ({"cpus": (0,)}, "one entry for each of 2"),
        ({"cpus": (0, -1)}, r"cpus\[1\]"),
        ({"cpus": (0, ())}, "at least one core"),
    ],
)
def test_wrong_numbers_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        HostsSpec(**{"hosts": 2, **values})


def test_text_of_rates_and_cores():
    assert parse_rate("100 Mbit/s") == 1e8
    assert parse_rate("2.5gbit") == 2.5e9
    assert parse_rates("1gbit") == 1e9
    assert parse_rates("0,50mbit; 200mbit,0") == ((0.0, 5e7), (2e8, 0.0))
    assert parse_cores("0, 2-3") == ((0,), (2, 3))
    for text in ("", "1", "gbit", "1e9bit", "1gbyte", "-1gbit", "1" * 50 + "bit", "999999gbit", None):
        with pytest.raises(InputError, match="hosts: rate"):
            parse_rate(text)
    for text in ("", "a", "1-", "3-2", "0,,1", "-1"):
        with pytest.raises(InputError, match="cores"):
            parse_cores(text)


def test_default_burst_follows_the_rate():
    spec = HostsSpec(2)
    assert spec.burst_of(1e9) == 125_000
    assert spec.burst_of(1e6) == 8192
    assert HostsSpec(2, burst_bytes=5000).burst_of(1e9) == 5000


def test_names_tell_the_dead_from_the_living():
    prefix = new_prefix()
    assert prefix != new_prefix()
    mine = f"{prefix}-host3"
    assert not is_stale(mine)
    _, pid, start, space, serial = prefix.split("-")
    assert is_stale(f"rlplace-{pid}-{int(start) + 1}-{space}-{serial}-host3")  # the id was used again
    assert is_stale(f"rlplace-{2**22 + 1}-{start}-{space}-{serial}-switch")  # beyond the largest id
    assert not is_stale(f"rlplace-{pid}-{int(start) + 1}-{int(space, 16) + 1:x}-{serial}-host3")  # another container's
    for foreign in ("rlplace", "rlplace-1-host0", "docker0", f"{mine}/../x", f"x{mine}"):
        assert not is_stale(foreign)


def test_without_root_or_tools_the_reason_is_given(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingError, match="need root"), emulated_hosts(HostsSpec(2)):
        pass
    assert main(["--hosts", "2", "--", "true"]) == 4
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(commands.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert commands.why_not() == "emulated hosts need the command 'tc'; install iproute2"


@pytest.mark.parametrize(
    "words",
    [
        ["--hosts", "2"],
        ["--hosts", "2", "--"],
        ["--hosts", "0", "--", "true"],
        ["--rate", "fast", "--", "true"],
        ["--cores", "x", "--", "true"],
        ["--timeout", "0", "--", "true"],
        ["--timeout", "nan", "--", "true"],
    ],
)
def test_wrong_command_lines_end_with_2(words, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("rlplace: ") and said.count("\n") == 1


def test_cluster_of_cards_and_of_pairs(tmp_path):
    cards = cluster_of(HostsSpec(3, 1e9), memory_bytes=1 << 30)
    assert cards.hosts == (0, 1, 2) and [device.name for device in cards.devices] == ["cpu0", "cpu1", "cpu2"]
    off = ~np.eye(3, dtype=bool)
    np.testing.assert_allclose(cards.links.bandwidth_bytes_per_s[off], 1.25e8 * PAYLOAD_FRACTION)
    held = cards.links.effective_channels
    assert set(held[0][1]) & set(held[0][2]) and set(held[1][0]) & set(held[2][0])  # one sender, one receiver
    assert not set(held[0][1]) & set(held[1][0]) and not set(held[0][1]) & set(held[1][2])  # full duplex, other cards
    pairs = cluster_of(HostsSpec(3, PAIRS), memory_bytes=1 << 30, latency_s=1e-4)
    np.testing.assert_allclose(pairs.links.bandwidth_bytes_per_s, np.array(PAIRS) / 8 * PAYLOAD_FRACTION)
    np.testing.assert_allclose(pairs.links.latency_s[off], 1e-4)
    every = [channel for row in pairs.links.effective_channels for held in row for channel in held]
    assert len(every) == len(set(every)) == 6
    for cluster in (cards, pairs):
        cluster.save(tmp_path / "c.toml")
        assert Cluster.load(tmp_path / "c.toml").fingerprint == cluster.fingerprint
    with pytest.raises(InputError, match="2 kinds for 3 hosts"):
        cluster_of(HostsSpec(3), kinds=cards.kinds[:2])


def test_cores_are_shared_among_those_pinned_to_them():
    assert cores_of(HostsSpec(4), usable=2) == (0.5,) * 4
    assert cores_of(HostsSpec(2, cpus=(0, 1)), usable=2) == (1.0, 1.0)
    assert cores_of(HostsSpec(3, cpus=(0, 0, (1, 2))), usable=4) == (0.5, 0.5, 2.0)
    halves = cluster_of(HostsSpec(2, cpus=(0, 0)), memory_bytes=1 << 30).kinds[0]
    whole = cluster_of(HostsSpec(1, cpus=(0,)), memory_bytes=1 << 30).kinds[0]
    assert halves.peak_flops["float32"] == whole.peak_flops["float32"] / 2
    assert halves.memory_bandwidth_bytes_per_s == whole.memory_bandwidth_bytes_per_s / 2
    unlike = cluster_of(HostsSpec(3, cpus=(0, 0, 1)), memory_bytes=1 << 30)
    assert [kind.name for kind in unlike.kinds] == ["cpu-0.5", "cpu-0.5", "cpu-1"]
