"""Rates between emulated hosts (root only, slow): what gloo moves is what was shaped, and torchrun finds its nodes."""

import sys

import numpy as np
import pytest

from tools.hosts import HostsSpec, cluster_of, emulated_hosts, measure_cluster
from tools.hosts.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine")]


@pytest.mark.slow
@pytest.mark.long
def test_measured_links_are_those_that_were_shaped():
    spec = HostsSpec(2, ((0, 1e9), (4e8, 0)))
    with emulated_hosts(spec) as hosts:
        measured = measure_cluster(hosts, repeats=3, time_limit_s=5)
    drawn = cluster_of(spec)
    off = ~np.eye(2, dtype=bool)
    found, shaped = measured.links.bandwidth_bytes_per_s[off], drawn.links.bandwidth_bytes_per_s[off]
    assert (found < 1.15 * shaped).all() and (found > 0.2 * shaped).all()  # a busy machine makes them slower
    assert (measured.links.latency_s[off] > 0).all()
    assert measured.links.effective_channels == drawn.links.effective_channels
    assert [device.name for device in measured.devices] == ["cpu0", "cpu1"] and measured.kinds == drawn.kinds


@pytest.mark.slow
@pytest.mark.long
def test_torchrun_finds_its_nodes(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "sys.stdout.write(f'rank {dist.get_rank()} of {int(total)} on {os.uname().nodename}\\n')\n"
        # A process that ends with its group alive may abort in gloo's own threads.
        "dist.destroy_process_group()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    assert main(["--hosts", "2", "--timeout", "600", "--", *torchrun]) == 0
    said = capfd.readouterr().out
    for rank in range(4):
        assert f"rank {rank} of 4 on host{rank // 2}" in said
