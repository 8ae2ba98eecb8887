"""The simulated devices and small models of tests/runtime; registered at collection, see there."""

from tests.runtime.sim_device import setup, sim  # noqa: F401, the fixture

setup()
