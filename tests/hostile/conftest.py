"""Seeds of every format, made once."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.hostile.seeds import make_seeds


@pytest.fixture(scope="session")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "seeds"
    make_seeds(folder)
    return folder


@pytest.fixture(scope="session")
def scratch(seeds, tmp_path_factory):
    """Returns a copy of the seeds that inputs take the place in."""
    return Path(shutil.copytree(seeds, tmp_path_factory.mktemp("hostile") / "scratch"))


@pytest.fixture
def no_hang():
    """Stops a loader that waits for ever, and fails the test whatever the loader makes of that."""
    waited = []

    def stop(number, frame):
        waited.append(number)
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert not waited, "it waited for what never comes"
