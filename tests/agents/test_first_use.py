"""On the first use other processes compile the kernels, and are gone with the one that started them."""

import os
import subprocess
import sys

import pytest

from rlplace.agents import first_use

SCRIPT = """
import subprocess

from rlplace.agents.first_use import compile_ahead

started = []


class Noted(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        started.append(self.pid)


subprocess.Popen = Noted
print(compile_ahead(), *started)
"""


@pytest.fixture
def started(monkeypatch):
    first_use.compile_ahead.cache_clear()
    found = []
    monkeypatch.setattr(first_use, "_start", found.append)
    yield found
    first_use.compile_ahead.cache_clear()


def test_what_is_cold_is_started_once(started, monkeypatch):
    monkeypatch.setattr(first_use, "is_compiled", lambda kernel: kernel.py_func.__name__ == "search")
    assert first_use.compile_ahead() and first_use.compile_ahead()
    assert started == ["from rlplace.planners.best import warm_up; warm_up()"]


def test_nothing_is_started_when_all_is_compiled(started, monkeypatch):
    monkeypatch.setattr(first_use, "is_compiled", lambda kernel: True)
    assert not first_use.compile_ahead() and started == []


def test_one_rank_of_a_host_starts_them(started, monkeypatch):
    monkeypatch.setattr(first_use, "is_compiled", lambda kernel: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert first_use.compile_ahead() and started == []


def test_helpers_end_with_the_process(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    cold, *helpers = done.stdout.split()
    assert cold == "True" and len(helpers) == 2
    for pid in helpers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
