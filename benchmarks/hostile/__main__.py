"""``python -m benchmarks.hostile --inputs 50000 --seed 0``: damages files of every format and gives them to the loaders.

Prints per loader how many inputs it was given, how many it loaded and refused, its processor time and the memory that it took
beyond that of the process. Anything else is a failure: it is told, its input is kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.hostile.seeds import make_seeds
from benchmarks.hostile.targets import TARGETS
from benchmarks.hostile.worker import Count, damaged, save_input


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000, help="over all loaders (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the damage (0)")
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), metavar="LOADER", help=", ".join(TARGETS))
    parser.add_argument(
        "--keep", type=Path, default=Path("hostile-failures"), help="where inputs that fail go (hostile-failures)"
    )
    options = parser.parse_args()
    names = options.only or list(TARGETS)
    whole = sum(TARGETS[name].share for name in names)
    counts = {name: Count() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        make_seeds(Path(folder) / "seeds")
        left = [(name, 0, max(1, round(options.inputs * TARGETS[name].share / whole))) for name in names]
        for part, line in enumerate(_run(left, Path(folder), options.seed, options.keep)):
            _add(counts[line.pop("name")], line)
            print(f"\r{part + 1} parts, {sum(c.inputs for c in counts.values())} inputs", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(table(counts))
    failures = [failure for count in counts.values() for failure in count.failures]
    for failure in failures[:20]:
        print(failure)
    return 1 if failures else 0


def _run(plan: list[tuple[str, int, int]], folder: Path, seed: int, keep: Path) -> Iterator[dict[str, object]]:
    """Workers one after another: one that dies is followed by another, which begins after the input that killed it."""
    progress, seeds, attempt = folder / "progress", folder / "seeds", 0
    while plan:
        attempt += 1
        options = {"seeds": str(seeds), "scratch": str(folder / f"scratch{attempt}"), "plan": plan, "seed": seed,
                   "progress": str(progress), "keep": str(keep)}  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.hostile.worker", json.dumps(options)]
        done = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
                done += 1
        if process.returncode == 0:
            return
        if not progress.exists():
            raise SystemExit("hostile: the worker ended before its first input")
        plan = plan[done:]
        name, number = progress.read_text().strip().split("|")
        _, first, last = plan[0]
        how = signal.Signals(-process.returncode).name if process.returncode < 0 else f"exit code {process.returncode}"
        file, payload = damaged(name, TARGETS[name], seeds, seed, int(number))
        save_input(keep, name, seed, int(number), file, payload, how)
        lost = int(number) + 1 - first  # the part's counts went with the process
        yield {"name": name, "inputs": lost, "failures": [f"{name} seed {seed} input {number}: the process died, {how}"]}
        progress.unlink()
        plan = [(name, int(number) + 1, last), *plan[1:]]


def _add(count: Count, line: dict[str, object]) -> None:
    for key in ("inputs", "loaded", "refused", "seconds"):
        setattr(count, key, getattr(count, key) + line.get(key, 0))
    count.peak_bytes = max(count.peak_bytes, int(str(line.get("peak_bytes", 0))))
    count.failures += line["failures"]  # type: ignore[operator]


def table(counts: dict[str, Count]) -> str:
    """The counts as a Markdown table."""
    rows = ["| loader | inputs | loaded | refused | failed | CPU seconds | peak MiB |", "|---|---|---|---|---|---|---|"]
    total = Count()
    for name, count in counts.items():
        _add(total, vars(count))
        rows.append(_row(name, count))
    return "\n".join([*rows, _row("all", total)])


def _row(name: str, count: Count) -> str:
    cells = (count.inputs, count.loaded, count.refused, len(count.failures), f"{count.seconds:.0f}", count.peak_bytes >> 20)
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
