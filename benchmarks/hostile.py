"""Damages files of every format and gives them to the loaders, with limits of memory and processor time.

    python -m benchmarks.hostile --inputs 50000 --seed 0
    python -m benchmarks.hostile --only plan problem

Prints how many inputs each loader was given, loaded and refused, its processor time and the memory that it took beyond that of
the process. Anything else is a failure: its least input is kept and the exit code is 1. Each loader has a process of its own.
"""

from __future__ import annotations

import resource
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from benchmarks.harness import apart, arguments, markdown, one_thread
from tests.hostile.damage import damaged
from tests.hostile.loaders import TARGETS, run_input
from tests.hostile.seeds import make_seeds

CPU_S = 20.0
"""Processor time of one input; a loader that holds the interpreter for twice as long is killed."""

MEMORY_BYTES = 1 << 30
"""Address space that a process may take beyond what it has when all modules are loaded."""

Counts = tuple[int, int, int, float, int]
"""Inputs, loaded, refused, seconds, bytes of peak memory."""


class TooLong(BaseException):
    """An input took too much processor time."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLong(f"more than {CPU_S:g} s of processor time")


def status(key: str) -> int:
    """Reads a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


def run(name: str, count: int, number: int, folder: Path, keep: Path) -> tuple[Counts, str]:
    """Gives so many inputs to one loader in this process; counts, and what went wrong with the least input."""
    target, seeds, scratch = TARGETS[name], folder / "seeds", folder / "scratch"
    shutil.copytree(seeds, scratch, dirs_exist_ok=True)
    for file in target.files:  # compiles what is compiled
        run_input(target, file, (seeds / file).read_bytes(), scratch)
    base, begin_s, found = status("VmRSS"), time.process_time(), {"loaded": 0, "refused": 0}
    limit = status("VmSize") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, _stop)
    keep.mkdir(parents=True, exist_ok=True)
    kept = keep / f"{name.replace(' ', '-')}-{number}"  # what is there when a process dies killed it

    def holds(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(target.files))
        payload = data.draw(damaged(target.kind, (seeds / file).read_bytes()))
        kept.write_bytes(payload)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + 2 * CPU_S) + 1, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            outcome = run_input(target, file, payload, scratch)
        except TooLong as error:
            outcome = str(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert outcome in found, f"{file}: {outcome}"
        found[outcome] += 1

    options = settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    wrong = ""
    try:
        seed(number)(options(given(st.data())(holds)))()
        kept.unlink()
    except AssertionError as error:
        wrong = f"{name}, seed {number}, {kept}: {error}"
    counts = (sum(found.values()), found["loaded"], found["refused"], time.process_time() - begin_s, status("VmHWM") - base)
    return counts, wrong


def died(name: str, reason: str) -> tuple[Counts, str]:
    """Tells of a process that did not answer."""
    return (0, 0, 0, 0.0, 0), f"{name}: {reason}; its input is kept"


def main() -> int:
    """Runs the loaders that are asked for; the exit code."""
    options = arguments(
        __doc__,
        inputs=(2000, "over all loaders (2000)"),
        seed=(0, "of the damage (0)"),
        only=(tuple(TARGETS), "names of loaders", TARGETS),
        keep=(Path("hostile-failures"), "folder of inputs that fail (hostile-failures)"),
    )
    one_thread()
    whole = sum(TARGETS[name].share for name in options.only)
    rows, failures = [], []
    with tempfile.TemporaryDirectory() as folder:
        make_seeds(Path(folder) / "seeds")
        for name in options.only:
            count = max(1, round(options.inputs * TARGETS[name].share / whole))
            job = (name, count, options.seed, Path(folder), options.keep)
            (*numbers, seconds, peak), wrong = apart(run, *job, limit_s=CPU_S * count, lost=partial(died, name))
            rows.append([name, *numbers, f"{seconds:.0f}", max(0, peak) >> 20])
            failures += [wrong] if wrong else []
    print(markdown(["loader", "inputs", "loaded", "refused", "CPU seconds", "peak MiB"], rows))
    print("\n".join(failures))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
