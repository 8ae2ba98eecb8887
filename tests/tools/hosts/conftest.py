"""The setting of tests of emulated hosts: they need root, and leave the machine as they found it."""

import os
from pathlib import Path

import pytest

from tests.tools.hosts.host_checks import kernel_lacks, left_behind, links
from tools.hosts.commands import why_not


@pytest.fixture
def machine():
    """Skips where hosts cannot be emulated; afterwards nothing of this process may be left."""
    reason = why_not() or kernel_lacks()
    if reason is not None:
        pytest.skip(reason)
    before = links()
    yield
    assert left_behind(os.getpid()) == []
    assert links() == before
    assert f"rlplace-{os.getpid()}-" not in Path("/proc/self/mounts").read_text()
