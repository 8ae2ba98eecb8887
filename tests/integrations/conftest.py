"""The simulated devices and small models of tests/runtime; registered at collection, see there."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

import sim_device

REASON = sim_device.setup()


@pytest.fixture
def sim():
    """``sim(n)`` names n simulated devices; their copies are in ``sim_device.copies``."""
    if REASON is not None:
        pytest.skip(REASON)
    sim_device.copies.clear()
    return lambda count: [f"sim:{index}" for index in range(count)]
