"""Faults put in by hand, one at a time: do the quick tests of their room notice?

    python -m benchmarks.faults                    all of them, and benchmarks/faults.rows.jsonl anew
    python -m benchmarks.faults --only ledger      those whose file or words have one of these texts; other rows stay
    python -m benchmarks.faults --table            the table of the rows

A fault is a text that stands once in a file, the wrong text in its place, and the quick tests that should notice
(`benchmarks/faults.toml`). Each is put into a fresh copy of the checkout. `benchmarks.mutation` draws its changes by seed and
for the simulator and the memory rules alone; these are what a careful reviewer would look for, over the whole product.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS, ROWS = ROOT / "benchmarks/faults.toml", ROOT / "benchmarks/faults.rows.jsonl"
KILLED, SURVIVED = "killed", "survived"
TIMEOUT_S = 600.0
"""Seconds until a fault counts as noticed, because its tests hang."""

_IMPORTED = (
    "torch",
    "torch.distributed.tensor",
    "numba",
    "scipy.optimize",
    "hypothesis",
    "pytest",
    "sb3_contrib",
    "transformers",
)
"""What is imported once, before a process is forked for each fault: it takes longer than most tests."""

_IGNORED = shutil.ignore_patterns(".git", ".*_cache", ".hypothesis", ".venv*", "runs", "build", "dist")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: The fault in words; no two have the same.
        file: Where, from the root.
        old: The right text, which stands once in the file.
        new: The wrong text.
        tests: Test files that should notice.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """Package or folder of the file."""
        parts = Path(self.file).parts
        return parts[1] if parts[0] == "rlplace" and len(parts) > 2 else parts[0]


@dataclass(frozen=True)
class Row:
    """What became of a fault: the first test that failed, or none; seconds are those of the run."""

    what: str
    room: str
    result: str
    by: str
    seconds: float


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """The faults of a file, in its order."""
    listed = tomllib.loads(path.read_text())["fault"]
    return [Fault(**{**one, "tests": tuple(one["tests"])}) for one in listed]


def with_fault(text: str, fault: Fault) -> str:
    """The file's text with the fault in it.

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
        copy = _copy(folder)
        place = copy / fault.file
        place.write_text(with_fault(place.read_text(), fault))
        result, by = _run(copy, fault.tests)
    return Row(fault.what, fault.room, result, by, round(time.monotonic() - start_s, 1))


def table(rows: Sequence[Row]) -> str:
    """Faults by room, and what survives."""
    count, lost = Counter(row.room for row in rows), Counter(row.room for row in rows if row.result == SURVIVED)
    lines = [
        "| room | faults | survive |",
        "|---|---|---|",
        *(f"| {room} | {count[room]} | {lost[room]} |" for room in sorted(count)),
    ]
    lines.append(f"| all | {len(rows)} | {lost.total()} ({lost.total() / max(1, len(rows)):.0%}) |")
    return "\n".join(lines)


def read_rows(path: Path = ROWS) -> list[Row]:
    """The rows of an earlier run; none where there is no file."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="faults whose file or words have one of these")
    parser.add_argument("--table", action="store_true", help="the table of the rows, without a run")
    args = parser.parse_args()
    if not args.table:
        _run_all(args.only)
    rows = read_rows()
    print("\n" + table(rows))
    for row in rows:
        if row.result == SURVIVED:
            print(f"- {row.what}")


def _run_all(only: Sequence[str] | None) -> None:
    faults = read_faults()
    chosen = [one for one in faults if only is None or any(text in one.file or text in one.what for text in only)]
    tests = sorted({test for fault in chosen for test in fault.tests})
    result, by = _run(ROOT, tests)  # which leaves compiled kernels for the copies
    if result != SURVIVED:
        raise SystemExit(f"without any fault the tests fail: {by}; a fault could not be told from that")
    rows = {} if only is None else {row.what: row for row in read_rows()}
    for fault in chosen:
        row = rows[fault.what] = try_fault(fault)
        print(f"{row.result:9s} {row.seconds:6.1f} s  {row.what}  {row.by}", flush=True)
        _write(rows, faults)


def _write(rows: Mapping[str, Row], faults: Sequence[Fault]) -> None:
    found = [rows[fault.what] for fault in faults if fault.what in rows]
    ROWS.write_text("".join(json.dumps(asdict(row)) + "\n" for row in found))


def _copy(folder: str) -> Path:
    """A copy of the checkout; times of files stay, so that compiled kernels are found."""
    return Path(shutil.copytree(ROOT, Path(folder) / "checkout", ignore=_IGNORED, symlinks=True))


def _run(copy: Path, tests: Sequence[str]) -> tuple[str, str]:
    """Whether quick tests notice, and the first that does."""
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
