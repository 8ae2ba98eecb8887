"""Parts that all benchmarks share: arguments, rows on disk, jobs that fill missing rows, intervals, and tables of pages.

A benchmark has a docstring that says what it measures, its cases, a function that makes rows, and one that makes the table.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace import stats

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
"""Data that are no part of this repository; benchmarks of them say so and end where they are missing."""

Row = dict[str, Any]


def arguments(doc: str | None, *positional: str, words: Sequence[str] | None = None, **options: Any) -> argparse.Namespace:
    """Reads the command line of a benchmark.

    Args:
        doc: Its docstring, which is the help.
        positional: Names of arguments of which there may be any number.
        words: The command line; default: that of this process.
        options: By name a text (a flag), or a default and a text, and perhaps choices. A tuple as default takes several words;
            its first entry or the default says the type, None and an empty tuple take text.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in positional:
        parser.add_argument(name, nargs="*")
    for name, option in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(option, str):
            parser.add_argument(flag, action="store_true", help=option)
            continue
        default, text, *choices = option
        example = default[0] if isinstance(default, tuple) and default else default
        kind = type(example) if isinstance(example, (int, float, Path)) else str
        several: dict[str, Any] = {"nargs": "+"} if isinstance(default, tuple) else {}
        parser.add_argument(flag, type=kind, default=default, help=text, choices=[*choices[0]] if choices else None, **several)
    return parser.parse_args(words)


def data(folder: Path | None, *parts: str) -> Path:
    """Finds a file or folder of data that are no part of this repository; ends the benchmark where it is missing."""
    path = (folder or SHARED).joinpath(*parts)
    if not path.exists():
        print(f"{path}: not there, and no part of this repository; name its folder with --data", file=sys.stderr)
        raise SystemExit(0)
    return path


def read_rows(path: Path) -> list[Row]:
    """Reads rows, a line of JSON each, perhaps compressed; none where there is no file."""
    if not path.exists():
        return []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines if line.strip()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes all rows of a file."""
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def add_row(path: Path, row: Row) -> Row:
    """Adds a row to a file and shows it."""
    with gzip.open(path, "at") if path.suffix == ".gz" else path.open("a") as out:
        out.write(json.dumps(row) + "\n")
    print(json.dumps(row)[:200], file=sys.stderr, flush=True)
    return row


def missing(path: Path, cells: Iterable[tuple[Any, ...]], *names: str) -> list[tuple[Any, ...]]:
    """Lists the cells that no row of a file has under these names."""
    known = {tuple(row[name] for name in names) for row in read_rows(path)}
    return [cell for cell in cells if cell not in known]


def spread(work: Callable[[Any], list[Row]], jobs: Sequence[Any], path: Path, processes: int) -> None:
    """Runs jobs in processes of their own and adds their rows to a file as they come."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for rows in pool.imap_unordered(work, jobs):
            for row in rows:
                add_row(path, row)


def apart(work: Callable[..., Any], *job: Any, limit_s: float, lost: Callable[[str], Any]) -> Any:
    """Runs a job in a forked process; what hangs or ends without an answer gives `lost` of the reason."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, job))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(limit_s) else lost(f"takes more than {limit_s:g} s")
    except EOFError:
        return lost("its process ended")
    finally:
        process.kill()
        process.join()


def _answer(pipe: Connection, work: Callable[..., Any], job: tuple[Any, ...]) -> None:
    pipe.send(work(*job))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Runs something once; its result and seconds of wall time."""
    begin_s = time.perf_counter()
    return work(), time.perf_counter() - begin_s


def geometric(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Takes the geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


def with_interval(logs: Sequence[float] | NDArray[np.float64], resamples: int = 4000) -> str:
    """Shows the geometric mean of ratios, from their logarithms, with its 95 % bootstrap interval over cases."""
    low, high = stats.interval(logs, resamples=resamples, least=1)
    return f"{np.exp(np.mean(logs)):.3f} [{low:.3f}, {high:.3f}]"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]], right: bool = False) -> str:
    """Makes a table of Markdown; `right` aligns all columns but the first to the right."""
    lines = [f"| {' | '.join(head)} |", "|---|" + ("---:|" if right else "---|") * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def write_between(page: Path, mark: str, text: str) -> None:
    """Replaces what a page has between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    before, begin, rest = page.read_text().partition(f"<!-- {mark} -->")
    _, end, after = rest.partition(f"<!-- /{mark} -->")
    if not begin or not end:
        sys.exit(f"{page}: the markers of {mark} are missing")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def replaced(text: str, pattern: str, new: str) -> str:
    """Replaces the one place of a page that a pattern finds."""
    made, count = re.subn(pattern, lambda found: new, text)
    if count != 1:
        raise ValueError(f"{pattern!r} stands in the page {count} times, not once")
    return made


def one_thread() -> None:
    """Leaves torch and its libraries one thread, here and in processes that start later."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
