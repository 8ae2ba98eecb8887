"""Faults put in by hand, one at a time: do the quick tests of their room notice?

    python -m benchmarks.faults                    all of them, and benchmarks/faults.rows.jsonl anew
    python -m benchmarks.faults --only ledger      those whose file or words have one of these texts; other rows stay
    python -m benchmarks.faults --table            the table of the rows

A fault is a text that stands once in a file, the wrong text in its place, and the quick tests that should notice
(`benchmarks/faults.toml`). Each is put into a fresh copy of the checkout. They
are what a careful reviewer would look for, over the whole product.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import ROOT, arguments, markdown, read_rows, write_rows

FAULTS, ROWS = ROOT / "benchmarks/faults.toml", ROOT / "benchmarks/faults.rows.jsonl"
KILLED, SURVIVED = "killed", "survived"
TIMEOUT_S = 600.0
"""Seconds until a fault counts as noticed, because its tests hang."""

_IMPORTED = (
    "torch", "torch.distributed.tensor", "numba", "scipy.optimize", "hypothesis", "pytest", "sb3_contrib", "transformers",
)  # fmt: skip
"""What is imported once, before a process is forked for each fault: it takes longer than most tests."""

_IGNORED = shutil.ignore_patterns(".git", ".*_cache", ".hypothesis", ".venv*", "runs", "build", "dist")


class Fault(NamedTuple):
    """One fault: words that no other has, a file from the root, text in it and in its place, and tests that should notice."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The package or folder of the file."""
        parts = Path(self.file).parts
        return parts[1] if parts[0] == "rlplace" and len(parts) > 2 else parts[0]


class Row(NamedTuple):
    """Result of a fault: the first test that failed, or none; seconds are those of the run."""

    what: str
    room: str
    result: str
    by: str
    seconds: float


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Reads the faults of a file, in its order."""
    listed = tomllib.loads(path.read_text())["fault"]
    return [Fault(**{**one, "tests": tuple(one["tests"])}) for one in listed]


def with_fault(text: str, fault: Fault) -> str:
    """Puts the fault into the text of its file.

    Raises:
        ValueError: Its right text does not stand there exactly once.
    """
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.file}: the text of {fault.what!r} stands there {count} times, not once; correct faults.toml")
    return text.replace(fault.old, fault.new)


def try_fault(fault: Fault) -> Row:
    """Runs the tests of a fault in a copy of the checkout that has it."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = copy_of(folder)
        place = copy / fault.file
        place.write_text(with_fault(place.read_text(), fault))
        result, by = run_tests(copy, fault.tests)
    return Row(fault.what, fault.room, result, by, round(time.monotonic() - start_s, 1))


def table(rows: Sequence[Row]) -> str:
    """Makes the table of faults by room, and how many survive."""
    count, lost = Counter(row.room for row in rows), Counter(row.room for row in rows if row.result == SURVIVED)
    last = ["all", len(rows), f"{lost.total()} ({lost.total() / max(1, len(rows)):.0%})"]
    return markdown(["room", "faults", "survive"], [*([room, count[room], lost[room]] for room in sorted(count)), last])


def read(path: Path = ROWS) -> list[Row]:
    """Reads the rows of an earlier run; none where there is no file."""
    return [Row(**row) for row in read_rows(path)]


def run_all(only: Sequence[str] | None) -> None:
    """Tries the faults whose file or words have one of these texts, and writes their rows."""
    faults = read_faults()
    chosen = [one for one in faults if not only or any(text in one.file or text in one.what for text in only)]
    result, by = run_tests(ROOT, sorted({test for fault in chosen for test in fault.tests}))  # compiles kernels for the copies
    if result != SURVIVED:
        raise SystemExit(f"without any fault the tests fail: {by}; a fault could not be told from that")
    rows = {row.what: row for row in read()} if only else {}
    for fault in chosen:
        row = rows[fault.what] = try_fault(fault)
        print(f"{row.result:9s} {row.seconds:6.1f} s  {row.what}  {row.by}", flush=True)
        write_rows(ROWS, (row_of._asdict() for fault in faults if (row_of := rows.get(fault.what))))


def main() -> None:
    """Tries faults and prints the table of all rows, and what survives."""
    options = arguments(
        __doc__, only=((), "faults whose file or words have one of these"), table="the table of the rows, without a run"
    )
    if not options.table:
        run_all(options.only)
    rows = read()
    print("\n" + table(rows))
    print("\n".join(f"- {row.what}" for row in rows if row.result == SURVIVED))


def copy_of(folder: str) -> Path:
    """Copies the checkout; times of files stay, so that compiled kernels are found."""
    return Path(shutil.copytree(ROOT, Path(folder) / "checkout", ignore=_IGNORED, symlinks=True))


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[str, str]:
    """Runs quick tests in a copy: whether they notice, and the first that does."""
    os.environ.update(PYTHONPATH=str(copy), CI="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as said:
        child = os.fork()
        if child == 0:
            _become_pytest(copy, tests, said.name)
        end_s = time.monotonic() + TIMEOUT_S
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end_s:
            time.sleep(0.1)
        if ended == (0, 0):
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return KILLED, "hangs"
        code, lines = os.waitstatus_to_exitcode(ended[1]), said.read().splitlines()
    if code in (4, 5):  # pytest's codes for arguments that it cannot take and for no tests
        raise SystemExit("\n".join([f"pytest could not run {', '.join(tests)}:", *lines[-20:]]))
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (SURVIVED, "") if code == 0 else (KILLED, failed[0].split(" - ")[0] if failed else f"pytest ended with {code}")


def _become_pytest(copy: Path, tests: Sequence[str], output: str) -> None:
    """Runs tests in this process and its own group, which then ends."""
    os.setpgid(0, 0)
    for handle in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), handle)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "rlplace")]:
        del sys.modules[name]
    os.chdir(copy)
    sys.path[:0] = [str(copy)]
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not long and not gpu"]
    code = importlib.import_module("pytest").main([*options, *tests])
    sys.stdout.flush()
    os._exit(int(code))


if __name__ == "__main__":
    main()
