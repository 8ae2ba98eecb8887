"""`ProblemCase`: a problem that the agent is trained, tuned or tested on; folders of them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

import rlplace
from rlplace.errors import InputError, show
from rlplace.files import cache_folder, read_json, write_json
from rlplace.plugins import version_of
from rlplace.problem import Problem
from rlplace.records import Record, build, plain
from rlplace.simulator import default_priority

BRANCHY = 1.5
"""A graph whose work is at least this many times its critical path is branchy."""

FORMAT, VERSION = "rlplace.cases", 2
INDEX = "cases.json"
SUFFIX = ".problem.json"
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # part of a file name
_SOURCES = ("model", "cluster", "cost", "problem", "simulator", "placement")  # rooms that cases and their floors depend on


@dataclass(frozen=True, eq=False)
class ProblemCase:
    """A problem with its origin.

    Attributes:
        name: Name, unique in its set.
        family: Model family, such as ``zoo:dlrm`` or ``synthetic:layered``.
        problem: The priced graph.
        branchy: Whether the graph offers parallel work, see `is_branchy`.
        unseen_cluster: The cluster has a size, a kind of device or a topology that training never draws, see
            `rlplace.agents.problems.graphs`.
    """

    name: str
    family: str
    problem: Problem
    branchy: bool = False
    unseen_cluster: bool = False


def is_branchy(problem: Problem) -> bool:
    """Returns whether the mean work is at least `BRANCHY` times the critical path without communication."""
    work = float(np.nanmean(problem.time_s, axis=1).sum())
    return work >= BRANCHY * float(default_priority(problem).max())


class _Entry(Record, frozen=True):
    """A case in the index.

    Attributes:
        name: Unique, of letters, digits, ``.``, ``_`` and ``-``; the problem is in ``NAME.problem.json``.
        family: Model that it comes from.
        problem: Fingerprint of the problem; another file under that name is refused.
        branchy: Whether its graph has branches.
        unseen_cluster: Whether its cluster is kept from training.
    """

    name: str
    family: str
    problem: str
    branchy: bool
    unseen_cluster: bool


class _Index(Record, frozen=True):
    """``cases.json``.

    Attributes:
        made_by: Versions that made the cases, for people and caches.
        cases: All cases.
    """

    made_by: dict[str, str]
    cases: tuple[_Entry, ...]


def save_cases(cases: Sequence[ProblemCase], folder: str | Path, *, made_by: Mapping[str, str] | None = None) -> None:
    """Writes a set of cases: the whole folder appears at once, or nothing. An earlier set in it is replaced.

    Args:
        cases: Cases with distinct names of letters, digits, ``.``, ``_`` and ``-``.
        folder: A new folder, or one that holds such a set.
        made_by: Versions that made them, kept in the index.
    """
    folder = Path(folder)
    names = [case.name for case in cases]
    for name in names:
        if not _SAFE.fullmatch(name) or names.count(name) > 1:
            raise InputError(f"case {show(name)}: names must differ and hold only letters, digits, '.', '_' and '-'")
    if folder.exists() and not (folder / INDEX).is_file() and any(folder.iterdir()):
        raise InputError(f"{folder}: holds other files; name a new folder for the cases")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from None
    try:
        for case in cases:
            case.problem.save(fresh / f"{case.name}{SUFFIX}")
        entries = [_Entry(c.name, c.family, c.problem.fingerprint, c.branchy, c.unseen_cluster) for c in cases]
        index = _Index(dict(made_by or {}), tuple(entries))
        write_json(fresh / INDEX, {"format": FORMAT, "version": VERSION, **plain(index)})
        if folder.exists():
            shutil.rmtree(folder)
        fresh.chmod(0o755)
        os.replace(fresh, folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load_cases(folder: str | Path) -> tuple[list[ProblemCase], dict[str, str]]:
    """Reads a folder of `save_cases`: the cases, and the versions that made them."""
    folder = Path(folder)
    index = build(_Index, read_json(folder / INDEX, FORMAT, VERSION), str(folder / INDEX))
    cases = [_case(entry, folder) for entry in index.cases]
    if len({case.name for case in cases}) < len(cases):
        raise InputError(f"{folder / INDEX}: a case appears twice")
    return cases, index.made_by


def set_folder(name: str) -> Path | None:
    """Returns the folder of a named set: ``cases/<name>`` in `rlplace.files.cache_folder`, None without a cache."""
    folder = cache_folder()
    return None if folder is None else folder / "cases" / name


@cache
def made_by() -> dict[str, str]:
    """Returns versions and a digest of the sources on which captured and priced cases, and their floors, depend."""
    versions = {name: version_of(name) for name in ("torch", "numpy", "transformers")}
    digest = hashlib.sha256()
    package = Path(rlplace.__file__).resolve().parent
    files = [*Path(__file__).resolve().parent.glob("*.py")]
    files += [file for room in _SOURCES for file in (package / room).rglob("*") if file.suffix in (".py", ".json")]
    for file in sorted(files, key=lambda item: (item.parent.name, item.name)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return {**versions, "sources": digest.hexdigest()}


def _case(entry: _Entry, folder: Path) -> ProblemCase:
    if not _SAFE.fullmatch(entry.name):
        raise InputError(f"{folder / INDEX}: {show(entry.name)} is not the name of a case")
    path = folder / f"{entry.name}{SUFFIX}"
    problem = Problem.load(path)
    if problem.fingerprint != entry.problem:
        raise InputError(f"{path}: is not the problem that {INDEX} names; make the set anew")
    return ProblemCase(entry.name, entry.family, problem, entry.branchy, entry.unseen_cluster)
