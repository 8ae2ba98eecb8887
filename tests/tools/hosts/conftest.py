"""What the tests of emulated hosts share: they need root, and leave the machine as they found it."""

import os
from pathlib import Path

import pytest
from host_checks import kernel_lacks, left_behind, links

from tools.hosts.commands import why_not
from tools.hosts.names import new_prefix


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


@pytest.fixture
def groups(machine):
    """Skips where no control group can be made."""
    from rlplace.errors import MissingError
    from tools.hosts.cgroups import make_group, remove_group

    try:
        remove_group(make_group(f"{new_prefix()}-host0", 0.5, 0.01))
    except MissingError as error:
        pytest.skip(str(error))
