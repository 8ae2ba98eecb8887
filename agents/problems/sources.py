"""`cases_of`: the cases that ``rlplace train --problems`` names, as one source."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rlplace.agents.cases import Case, is_branchy
from rlplace.agents.problems.training import ALL_FAMILIES, SYNTHETIC, ZOO_FAMILIES, training_case
from rlplace.errors import InputError, MissingError, show
from rlplace.files import cache_folder, read_json, write_json
from rlplace.plugins import version_of
from rlplace.problem import Problem
from rlplace.records import Record, build, plain

FORMAT, VERSION = "rlplace.cases", 2
INDEX = "cases.json"
_SUFFIX = ".problem.json"
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # part of a file name
_SOURCES = ("graph", "cluster", "cost", "problem", "zoo", "simulator", "planners")


class _Entry(Record, frozen=True):
    """A case as the index has it.

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


def save_cases(cases: Sequence[Case], folder: str | Path, *, made_by: Mapping[str, str] | None = None) -> None:
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
            case.problem.save(fresh / f"{case.name}{_SUFFIX}")
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


def load_cases(folder: str | Path) -> tuple[list[Case], dict[str, str]]:
    """Reads a folder of `save_cases`: the cases, and the versions that made them."""
    folder = Path(folder)
    index = build(_Index, read_json(folder / INDEX, FORMAT, VERSION), str(folder / INDEX))
    cases = [_case(entry, folder) for entry in index.cases]
    if len({case.name for case in cases}) < len(cases):
        raise InputError(f"{folder / INDEX}: a case appears twice")
    return cases, index.made_by


def set_folder(name: str) -> Path | None:
    """Folder of a named set: ``cases/<name>`` in `rlplace.files.cache_folder`, None where nothing is kept."""
    folder = cache_folder()
    return None if folder is None else folder / "cases" / name


@cache
def made_by() -> dict[str, str]:
    """Returns versions and a digest of the sources that captured and priced cases, and their floors, depend on."""
    versions = {name: version_of(name) for name in ("torch", "numpy", "transformers")}
    digest = hashlib.sha256()
    base = Path(__file__).resolve().parent
    files = [*base.glob("*.py"), base.parent / "cases.py"]
    import rlplace

    package = Path(rlplace.__file__).resolve().parent
    files += [file for room in _SOURCES for file in (package / room).rglob("*") if file.suffix in (".py", ".json")]
    for file in sorted(files, key=lambda item: (item.parent.name, item.name)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return {**versions, "sources": digest.hexdigest()}


def _case(entry: _Entry, folder: Path) -> Case:
    if not _SAFE.fullmatch(entry.name):
        raise InputError(f"{folder / INDEX}: {show(entry.name)} is not the name of a case")
    path = folder / f"{entry.name}{_SUFFIX}"
    problem = Problem.load(path)
    if problem.fingerprint != entry.problem:
        raise InputError(f"{path}: is not the problem that {INDEX} names; make the set anew")
    return Case(entry.name, entry.family, problem, entry.branchy, entry.unseen_cluster)


STREAMS = {"all": ALL_FAMILIES, "zoo": ZOO_FAMILIES, "synthetic": (SYNTHETIC,)}
"""Endless sets by name: zoo and transformers models and synthetic graphs; those without transformers; synthetic ones alone."""


@dataclass(frozen=True)
class CaseSource:
    """Cases by number.

    Attributes:
        name: Name of the source, for cards and messages.
        case: Builds the case of a number; the same number always gives the same case.
        count: Number of cases; None: there is no end.
    """

    name: str
    case: Callable[[int], Case]
    count: int | None

    def __iter__(self) -> Iterator[Case]:
        number = 0
        while self.count is None or number < self.count:
            yield self.case(number)
            number += 1


def default_set() -> str:
    """``all``, or ``zoo`` where the transformers extra is not installed."""
    return "all" if find_spec("transformers") is not None else "zoo"


def cases_of(names: Sequence[str | Path], *, seed: int = 0, cluster: str | None = None) -> CaseSource:
    """Returns the source of the cases with these names.

    Args:
        names: One of `STREAMS` alone; or files ``*.problem.json`` and folders of them, any number. Empty: the
            default stream.
        seed: Seed of a stream.
        cluster: Text of the one cluster that the captured models of a stream are priced for.

    Raises:
        InputError: An unknown name, or a mixture of a stream and files.
        MissingError: The stream needs the transformers extra.
    """
    asked = [str(name) for name in names] or [default_set()]
    title = " ".join(asked)
    named = [name for name in asked if name in STREAMS]
    if named and len(asked) > 1:
        raise InputError(f"--problems {title}: {named[0]} stands alone; name a set, or files and folders")
    if named:
        families = STREAMS[title]
        if title == "all" and find_spec("transformers") is None:
            raise MissingError("the set 'all' needs the transformers extra: pip install 'rlplace[transformers]', or use 'zoo'")
        return CaseSource(title, lambda number: training_case(seed, number, families=families, cluster=cluster), None)
    if cluster is not None:
        raise InputError(f"--problems {title}: these problems have clusters of their own; leave --cluster out")
    cases = [case for name in asked for case in _read(name)]
    return CaseSource(title, cases.__getitem__, len(cases))


def _read(name: str) -> list[Case]:
    """Returns the cases of a folder that `save_cases` wrote, or every problem of a folder or file, its step executed
    plainly.
    """
    path = Path(name)
    if path.is_dir():
        if (path / INDEX).is_file():
            return load_cases(path)[0]
        files = sorted(path.glob(f"*{_SUFFIX}"))
        if not files:
            raise InputError(f"{path}: the folder holds no *{_SUFFIX} file; make one with 'rlplace capture'")
    elif path.is_file():
        files = [path]
    else:
        known = ", ".join(STREAMS)
        raise InputError(f"unknown problem set {name!r}; known: {known}, or files and folders of *.problem.json")
    cases = []
    for file in files:
        problem = Problem.load(file)
        family = file.name.removesuffix(_SUFFIX)
        cases.append(Case(family, family, problem, branchy=is_branchy(problem)))
    return cases
