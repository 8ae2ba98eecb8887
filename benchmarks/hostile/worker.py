"""Runs inputs under limits of memory and processor time: what ends in anything but success or one line is a failure."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from benchmarks.hostile.mutate import mutate
from benchmarks.hostile.targets import TARGETS, Target

CPU_S = 20.0
"""Processor time of one input; a loader that holds the interpreter for twice as long is killed."""

MEMORY_BYTES = 1 << 30
"""Address space that one process may take beyond what it has when all modules are loaded."""

MAX_MESSAGE = 1000
"""What `rlplace.errors.plain` cuts messages to."""


@dataclass
class Count:
    """What became of the inputs of one loader."""

    inputs: int = 0
    loaded: int = 0
    refused: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    failures: list[str] = field(default_factory=list)


class TooLong(BaseException):
    """An input took too much processor time."""


def damaged(name: str, target: Target, seeds: Path, seed: int, number: int) -> tuple[str, bytes]:
    """Input `number` of a loader: the seed file that it replaces, and its bytes. It depends on the arguments alone."""
    rng = Random(f"{name}:{seed}:{number}")
    file = rng.choice(target.files)
    return file, mutate(target.kind, (seeds / file).read_bytes(), rng)


def run_input(target: Target, file: str, payload: bytes, scratch: Path) -> str | None:
    """Gives one input to a loader.

    Args:
        target: The loader.
        file: Name in `scratch` that the input takes.
        payload: The input.
        scratch: A copy of all seeds, which is left as it was.

    Returns:
        ``"loaded"``, ``"refused"`` or what went wrong, with a traceback.
    """
    from rlplace.errors import RlplaceError

    path = scratch / file
    before = path.read_bytes()
    known = _listing(scratch)
    try:
        path.write_bytes(payload)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.use(path, scratch)
        outcome = "loaded"
    except RlplaceError as error:
        text = str(error)
        outcome = "refused"
        if not text or len(text) > MAX_MESSAGE or not text.isprintable():
            outcome = f"a message that is not one plain line: {text[:300]!r}"
    except (Exception, TooLong):
        outcome = traceback.format_exc(limit=-6)
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)
    left = _listing(scratch) ^ known
    for name in left:
        (scratch / name).unlink(missing_ok=True)
    return f"left {sorted(left)}" if left and outcome in ("loaded", "refused") else outcome


def _listing(folder: Path) -> set[str]:
    return {os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names}


def warm_up(seeds: Path, scratch: Path, names: list[str]) -> None:
    """Loads every seed as it is: compiles what is compiled, and shows that the seeds are good."""
    for name in names:
        for file in TARGETS[name].files:
            outcome = run_input(TARGETS[name], file, (seeds / file).read_bytes(), scratch)
            if outcome != "loaded" and not name.endswith("text"):
                raise SystemExit(f"{name}: the seed {file} is not loaded: {outcome}")


def work(seeds: Path, scratch: Path, plan: list[tuple[str, int, int]], seed: int, progress: Path, keep: Path) -> None:
    """Runs ``(loader, first, last)`` ranges of inputs and prints a line of JSON for each.

    Args:
        seeds: Folder of seeds.
        scratch: New folder to work in.
        plan: What to run.
        seed: Seed of the damage.
        progress: File that always names the input at hand.
        keep: Where inputs that fail go.
    """
    shutil.copytree(seeds, scratch)
    warm_up(seeds, scratch, [name for name, _, _ in plan])
    limit = _status("VmSize") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, _stop)
    handle = os.open(progress, os.O_RDWR | os.O_CREAT)
    for name, first, last in plan:
        count, base, begin_s = Count(), _reset_peak(), time.process_time()
        for number in range(first, last):
            os.pwrite(handle, f"{name}|{number}".ljust(64).encode(), 0)
            file, payload = damaged(name, TARGETS[name], seeds, seed, number)
            outcome = _limited(TARGETS[name], file, payload, scratch)
            count.inputs += 1
            count.loaded += outcome == "loaded"
            count.refused += outcome == "refused"
            if outcome not in ("loaded", "refused"):
                count.failures.append(f"{name} seed {seed} input {number}: {outcome}")
                save_input(keep, name, seed, number, file, payload, str(outcome))
        count.seconds = time.process_time() - begin_s
        count.peak_bytes = max(0, _status("VmHWM") - base)
        print(json.dumps({"name": name, "next": last, **asdict(count)}), flush=True)


def save_input(keep: Path, name: str, seed: int, number: int, file: str, payload: bytes, outcome: str) -> None:
    """Keeps an input that failed, and how."""
    keep.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace(' ', '-')}-{seed}-{number}"
    (keep / f"{stem}-{Path(file).name}").write_bytes(payload)
    (keep / f"{stem}.txt").write_text(outcome, errors="backslashreplace")


def _limited(target: Target, file: str, payload: bytes, scratch: Path) -> str | None:
    used = time.process_time()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + 2 * CPU_S) + 1, hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        return run_input(target, file, payload, scratch)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLong(f"more than {CPU_S:g} s of processor time")


def _status(key: str) -> int:
    """A size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def _reset_peak() -> int:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def main(arguments: list[str]) -> None:
    """``python -m benchmarks.hostile.worker`` with one JSON object of the arguments of `work`."""
    import torch

    torch.set_num_threads(1)
    options: dict[str, Any] = json.loads(arguments[0])
    paths = {key: Path(options[key]) for key in ("seeds", "scratch", "progress", "keep")}
    work(plan=[(name, first, last) for name, first, last in options["plan"]], seed=options["seed"], **paths)


if __name__ == "__main__":
    main(sys.argv[1:])
