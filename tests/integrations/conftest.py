"""The simulated devices and small models of tests/runtime; registered at collection, see there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from sim_device import setup, sim  # noqa: F401, the fixture

setup()
