"""Simulated devices for all tests in this folder.

They are registered when the tests are collected, because torch's autograd engine counts devices in the first backward pass of
the process, which another test may run.
"""

from sim_device import setup, sim  # noqa: F401, the fixture

setup()
