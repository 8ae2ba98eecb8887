"""Mutation testing of the simulator and of everything that counts memory.

    python -m benchmarks.mutation --out mutants.jsonl                 goes on where it stopped
    python -m benchmarks.mutation --out mutants.jsonl --report        only the table and the survivors

A mutant is a file with one operator, number or statement changed. The quick tests of its room run against it; a mutant that
they do not notice has survived, and is a hole in the tests unless it means the same as the original. Some mutants a file are
drawn by seed, since a mutant takes from seconds (noticed at once) to a minute, one of a compiled file some minutes.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.mutation.mutants import mutants

ROOT = Path(__file__).resolve().parents[2]
_SIMULATOR = ["tests/simulator", "tests/test_actions.py"]
_MEMORY = [f"tests/cost/test_{name}.py" for name in ("memory_real", "memory_allocator", "memory_footprint")]
TARGETS = {
    "rlplace/plan/actions.py": _SIMULATOR,
    **{
        f"rlplace/simulator/{name}.py": _SIMULATOR
        for name in ("reference", "ledger", "timeline", "api", "inputs", "lowering", "fast", "loop", "queues")
    },
    **{f"rlplace/cost/{name}.py": _MEMORY for name in ("lifetimes", "holdings", "footprint", "allocator", "allocator_heap")},
    "envs/instance.py": ["tests/envs"],
    "rlplace/placement/common/repair.py": ["tests/placement/test_repair.py", "tests/placement/test_shortage.py"],
    "rlplace/placement/common/shortage.py": ["tests/placement/test_shortage.py"],
}
"""Files and the tests that should notice."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON a mutant")
    parser.add_argument("--each", type=int, default=12, help="mutants of a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", default=list(TARGETS), choices=list(TARGETS), metavar="FILE")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a mutant counts as noticed by hanging")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if not args.report:
        known = {(row["file"], row["number"]) for row in done}
        for file in args.files:
            changes = mutants((ROOT / file).read_text())
            for mutant in random.Random(f"{args.seed} {file}").sample(changes, min(args.each, len(changes))):
                if (file, mutant.number) in known:
                    continue
                row = {"file": file, "number": mutant.number, "line": mutant.line, "what": mutant.what, "of": len(changes)}
                row |= _run(file, mutant.number, args.timeout)
                done.append(row)
                with args.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                print(f"{row['result']:9s} {row['seconds']:6.1f} s  {file}:{mutant.line}  {mutant.what}", flush=True)
    _report(done)


def _run(file: str, number: int, timeout_s: float) -> dict[str, object]:
    options = ["-x", "-q", "-p", "benchmarks.mutation.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *TARGETS[file]]
    environment = {**os.environ, "MUTANT": f"{file}:{number}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        if "@entry" in (text := (ROOT / file).read_text()) or "@inner" in text:  # the kernels of the original must not be found
            environment["NUMBA_CACHE_DIR"] = cache
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout_s, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"result": "hangs", "seconds": timeout_s, "by": ""}
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode in (4, 5):  # pytest's codes for arguments that it cannot take and for no tests
        raise SystemExit(f"pytest could not run the tests of {file}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    result = "survived" if done.returncode == 0 else "killed"
    return {"result": result, "seconds": round(time.monotonic() - start_s, 1), "by": failed[0][:160] if failed else ""}


def _report(rows: list[dict[str, object]]) -> None:
    print("\n| file | places | tried | noticed | survived |\n|---|---|---|---|---|")
    files = collections.defaultdict(list)
    for row in rows:
        files[row["file"]].append(row)
    for file, mine in files.items():
        lost = sum(row["result"] == "survived" for row in mine)
        print(f"| `{file}` | {mine[0]['of']} | {len(mine)} | {len(mine) - lost} | {lost} |")
    lost = [row for row in rows if row["result"] == "survived"]
    print(f"| all | | {len(rows)} | {len(rows) - len(lost)} | {len(lost)} |\n\nsurvivors:")
    for row in lost:
        print(f"- {row['file']}:{row['line']} {row['what']}")


if __name__ == "__main__":
    main()
