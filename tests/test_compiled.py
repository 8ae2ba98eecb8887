"""Kernels are compiled once, whoever wants them at the same time."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.errors import TypingError

from rlplace.compiled import entry, inner, is_compiled

MODULE = """
import sys

from rlplace.compiled import entry, inner, is_compiled


@inner
def twice(x):
    return 2 * x


@entry
def total(values):
    found = 0.0
    for value in values:
        found += twice(value)
    return found


if __name__ == "__main__":
    import numpy as np

    before = is_compiled(total)
    print("ready", flush=True)
    sys.stdin.readline()
    assert total(np.ones(3)) == 6.0
    print(before, sum(total.stats.cache_misses.values()), sum(total.stats.cache_hits.values()))
"""


def run_together(folder, count):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, str(folder / "mine.py")]
    pipe = subprocess.PIPE
    jobs = [subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    return sorted(job.communicate(timeout=120)[0].split() for job in jobs)


def test_one_process_compiles_and_the_others_load(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    assert run_together(tmp_path, 3) == [["False", "0", "1"], ["False", "0", "1"], ["False", "1", "0"]]
    assert run_together(tmp_path, 1) == [["True", "0", "1"]]


def test_a_compilation_that_fails_leaves_no_lock():
    @entry
    def wrong(value):
        return value.nothing

    with pytest.raises(TypingError, match="nothing"):
        wrong(1.0)
    with (Path(wrong._cache.cache_path) / f"{wrong._cache._impl.filename_base}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody keeps it
    assert not is_compiled(wrong)


def test_options_reach_numba():
    @entry(nogil=True)
    def outside(x):
        return part(x)

    @inner(fastmath=True, forceinline=True)
    def part(x):
        return x + 1

    assert outside.targetoptions["nogil"] and outside.targetoptions["error_model"] == "numpy"
    assert part.targetoptions["fastmath"] and part.targetoptions["forceinline"] and part.targetoptions["no_cpython_wrapper"]
