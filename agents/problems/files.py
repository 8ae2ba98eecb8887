"""Sets of cases as folders: one ``*.problem.json`` a case, and ``cases.json`` that says how each is executed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rlplace.agents.cases import Case, is_branchy
from rlplace.errors import InputError, show
from rlplace.files import check_keys, read_json, write_json
from rlplace.planners.common.evaluate import Execution
from rlplace.problem import Problem

FORMAT, VERSION = "rlplace.cases", 1
INDEX = "cases.json"
_SUFFIX = ".problem.json"
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # part of a file name
_SOURCES = ("graph", "cluster", "cost", "problem", "zoo", "simulator")


def save_cases(cases: Sequence[Case], folder: str | Path, *, made_by: Mapping[str, str] | None = None) -> None:
    """Writes a set of cases: the whole folder appears at once, or nothing. An earlier set in it is replaced.

    Args:
        cases: With different names, of letters, digits, ``.``, ``_`` and ``-``.
        folder: A new folder, or one that holds such a set.
        made_by: What made them, kept in the index.
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
        index = {
            "format": FORMAT,
            "version": VERSION,
            "made_by": dict(made_by or {}),
            "cases": [_to_dict(case) for case in cases],
        }
        write_json(fresh / INDEX, index)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.chmod(0o755)
        os.replace(fresh, folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load_cases(folder: str | Path) -> tuple[list[Case], dict[str, str]]:
    """Reads what `save_cases` wrote: the cases, and what made them."""
    folder = Path(folder)
    data = _index(folder)
    cases = [_from_dict(item, folder, str(folder / INDEX)) for item in data["cases"]]
    if len({case.name for case in cases}) < len(cases):
        raise InputError(f"{folder / INDEX}: a case appears twice")
    return cases, dict(data["made_by"])


def set_made_by(folder: str | Path) -> dict[str, str] | None:
    """What made the cases of a folder, None when it holds no set of cases."""
    folder = Path(folder)
    return dict(_index(folder)["made_by"]) if (folder / INDEX).is_file() else None


def load_problem_cases(path: str | Path, executions: Sequence[Execution]) -> list[Case]:
    """The cases of a folder that `save_cases` wrote, or every problem of a folder or file with each of the executions."""
    path = Path(path)
    if path.is_dir():
        if (path / INDEX).is_file():
            return load_cases(path)[0]
        found = sorted(path.glob(f"*{_SUFFIX}"))
        if not found:
            raise InputError(f"{path}: the folder holds no *{_SUFFIX} file; make one with 'rlplace capture'")
    elif path.is_file():
        found = [path]
    else:
        raise InputError(f"{path}: no such file or folder of *{_SUFFIX} files")
    cases = []
    for file in found:
        problem = Problem.load(file)
        branchy = is_branchy(problem)
        family = file.name.removesuffix(_SUFFIX)
        for run in executions:
            name = family if len(executions) == 1 else f"{family}-{run.microbatches}-{run.schedule}"
            cases.append(Case(name, family, problem, run, branchy))
    return cases


def set_folder(name: str) -> Path:
    """Where a named set is kept: ``cases/<name>`` in ``$RLPLACE_CACHE``, else in the person's cache folder."""
    given = os.environ.get("RLPLACE_CACHE")
    if given:
        return Path(given) / "cases" / name
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rlplace" / "cases" / name


@cache
def made_by() -> dict[str, str]:
    """Versions and a digest of the sources that captured and priced cases depend on."""
    found = {name: metadata.version(name) for name in ("torch", "numpy")}
    try:
        found["transformers"] = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        found["transformers"] = ""
    digest = hashlib.sha256()
    base = Path(__file__).resolve().parent
    files = [*base.glob("*.py"), base.parent / "cases.py"]
    import rlplace

    package = Path(rlplace.__file__).resolve().parent
    files += [file for room in _SOURCES for file in (package / room).rglob("*") if file.suffix in (".py", ".json")]
    for file in sorted(files, key=lambda item: (item.parent.name, item.name)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return {**found, "sources": digest.hexdigest()}


def _index(folder: Path) -> dict[str, Any]:
    data = read_json(folder / INDEX, FORMAT, VERSION)
    where = str(folder / INDEX)
    check_keys(data, ("cases", "made_by"), (), where)
    if not isinstance(data["cases"], list) or not isinstance(data["made_by"], dict):
        raise InputError(f"{where}: cases must be a list and made_by an object")
    return data


def _to_dict(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "family": case.family,
        "problem": case.problem.fingerprint,
        "microbatches": case.execution.microbatches,
        "schedule": case.execution.schedule,
        "branchy": case.branchy,
        "unseen_cluster": case.unseen_cluster,
    }


def _from_dict(data: Any, folder: Path, where: str) -> Case:
    keys = ("name", "family", "problem", "microbatches", "schedule", "branchy", "unseen_cluster")
    check_keys(data, keys, (), f"{where}: case")
    name = data["name"]
    if not isinstance(name, str) or not _SAFE.fullmatch(name):
        raise InputError(f"{where}: {show(name)} is not the name of a case")
    if not isinstance(data["family"], str) or not all(isinstance(data[key], bool) for key in ("branchy", "unseen_cluster")):
        raise InputError(f"{where}: case {name}: family must be text, branchy and unseen_cluster true or false")
    problem = Problem.load(folder / f"{name}{_SUFFIX}")
    if problem.fingerprint != data["problem"]:
        raise InputError(f"{folder / name}{_SUFFIX}: is not the problem that {INDEX} names; make the set anew")
    execution = Execution(data["microbatches"], data["schedule"])
    return Case(name, data["family"], problem, execution, data["branchy"], data["unseen_cluster"])
