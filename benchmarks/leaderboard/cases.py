"""The problems of the board: the test split as it was when the board began, in one file, so that entries stay comparable.

`rlplace.agents.problems.test_cases` captures and prices the split anew with every version of torch, transformers and rlplace,
and its problems then differ in the last digits or more. Plans only compare on the same problem.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from benchmarks.leaderboard.reading import HERE, unpack
from rlplace.agents.problems.cases import ProblemCase
from rlplace.errors import InputError
from rlplace.files import check_header, parse_json, read_bytes, write_bytes
from rlplace.problem.io import problem_from_dict, problem_to_dict
from rlplace.records import Record, build

FILE = HERE / "cases.jsonl.gz"
FORMAT, VERSION = "rlplace.leaderboard_cases", 1
_BYTES = 1 << 28


class CaseInfo(Record, frozen=True):
    """A case without its problem.

    Attributes:
        name, family, branchy, unseen_cluster: See `rlplace.agents.problems.cases.ProblemCase`.
        problem: Fingerprint of the problem.
    """

    name: str
    family: str
    branchy: bool
    unseen_cluster: bool
    problem: str


def freeze(cases: Sequence[ProblemCase], made_by: Mapping[str, str], path: Path = FILE) -> None:
    """Writes cases to a file that is the same for the same cases."""
    lines: list[dict[str, Any]] = [{"format": FORMAT, "version": VERSION, "made_by": dict(made_by)}]
    for case in cases:
        lines.append({"case": asdict(info_of(case)), "problem": problem_to_dict(replace(case.problem, source=None))})
    write_bytes(path, gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0))


def info_of(case: ProblemCase) -> CaseInfo:
    """Returns a case without its problem."""
    return CaseInfo(case.name, case.family, case.branchy, case.unseen_cluster, case.problem.fingerprint)


def board_infos(path: Path = FILE) -> dict[str, CaseInfo]:
    """Returns the cases by name, without their problems."""
    return {info.name: info for info, _ in _lines(path)}


def board_cases(path: Path = FILE) -> dict[str, ProblemCase]:
    """Returns the cases by name, each problem as its fingerprint says.

    Raises:
        InputError: The file is broken.
    """
    cases = {}
    for info, data in _lines(path):
        problem = problem_from_dict(data)
        if problem.fingerprint != info.problem:
            raise InputError(f"{path}: the problem of {info.name} is not the one of its fingerprint; take the file anew")
        cases[info.name] = ProblemCase(info.name, info.family, problem, info.branchy, info.unseen_cluster)
    return cases


def _lines(path: Path) -> Iterator[tuple[CaseInfo, dict[str, Any]]]:
    head, *lines = unpack(read_bytes(path), str(path), _BYTES).splitlines()
    check_header(parse_json(head, f"{path} line 1"), FORMAT, VERSION, f"{path} line 1")
    for number, line in enumerate(lines, start=2):
        data = parse_json(line, f"{path} line {number}")
        yield build(CaseInfo, data["case"], f"{path} line {number}: case"), data["problem"]
