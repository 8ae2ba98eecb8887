"""Simulated devices for all tests in this folder, and a process that no job has started.

They are registered when the tests are collected, because torch's autograd engine counts devices in the first backward pass of
the process, which another test may run.
"""

import pytest
import torch.distributed as dist

from tests.runtime.sim_device import setup, sim  # noqa: F401, the fixture

setup()


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def one_rank(monkeypatch):
    """A process group of this process alone."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
