"""The board: its problems, and LEADERBOARD.md from submissions, a table a class, ordered, with intervals.

The problems are the test split as it was when the board began, in one file, so that entries stay comparable:
`rlplace.agents.problems.split_cases` captures and prices the split anew with every version of torch, transformers and rlplace,
and its problems then differ in the last digits or more. Plans only compare on the same problem.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict

from benchmarks.agent.tables import RESAMPLES, markdown
from benchmarks.leaderboard.submission import BUDGETS, HERE, Submission, unpack
from rlplace.agents.problems.cases import ProblemCase
from rlplace.errors import InputError
from rlplace.files import check_header, parse_json, read_bytes, write_bytes
from rlplace.problem.io import problem_from_dict, problem_to_dict
from rlplace.records import Record, build
from rlplace.stats import TIE, interval

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


_TEXT = HERE / "page.md"
"""What the page says before and behind the tables of the classes."""

BASE = "best"
"""The submission that step times are divided by."""


@dataclass(frozen=True)
class Standing:
    """A line of a table.

    Attributes:
        submission: Whose it is.
        logs: Log of step time over that of `BASE` by case, where there is a plan.
        first: Cases where nothing of its class is more than `TIE` faster.
    """

    submission: Submission
    logs: dict[str, float]
    first: int

    @property
    def order(self) -> tuple[int, float, str]:
        """More plans first, then the smaller mean: leaving out hard cases must not help."""
        mean = float(np.mean(list(self.logs.values()))) if self.logs else math.inf
        return -len(self.logs), mean, self.submission.card.name


def standings(submissions: Sequence[Submission], infos: Mapping[str, CaseInfo]) -> dict[str, list[Standing]]:
    """Returns the lines of every class that has any, in order.

    Args:
        submissions: Checked ones, `BASE` among them.
        infos: The cases by name.
    """
    base = next((item for item in submissions if item.card.name == BASE), None)
    if base is None:
        raise InputError(f"submissions: {BASE} is not among them, and step times are divided by its; add its folder")
    floor_s = {case: row.step_time_s for case, row in base.rows.items() if row.step_time_s is not None}
    lines: dict[str, list[Standing]] = {}
    for budget in BUDGETS:
        mine = [item for item in submissions if item.card.budget == budget]
        steps = {item.card.name: {c: row.step_time_s for c, row in item.rows.items() if row.step_time_s} for item in mine}
        fastest = {
            case: min(s[case] for s in steps.values() if case in s) for case in infos if any(case in s for s in steps.values())
        }
        lines[budget] = sorted(
            (
                Standing(
                    item,
                    {c: math.log(s / floor_s[c]) for c, s in steps[item.card.name].items() if c in floor_s},
                    sum(s <= fastest[c] * (1 + TIE) for c, s in steps[item.card.name].items()),
                )
                for item in mine
            ),
            key=lambda line: line.order,
        )
    return {budget: found for budget, found in lines.items() if found}


def page(submissions: Sequence[Submission], infos: Mapping[str, CaseInfo]) -> str:
    """Returns the whole of LEADERBOARD.md."""
    branchy = [name for name, info in infos.items() if info.branchy]
    head, _, how = _TEXT.read_text().partition("<!-- classes -->\n")
    parts = [head.format(cases=len(infos), branchy=len(branchy), tie=f"{TIE:.1%}")]
    for budget, lines in standings(submissions, infos).items():
        body = []
        for place, line in enumerate(lines, start=1):
            card = line.submission.card
            body.append(
                [
                    str(place),
                    f"[{card.name}](benchmarks/leaderboard/submissions/{card.name}/card.toml)",
                    card.authors,
                    card.kind,
                    _ratio(line.logs, list(infos)),
                    _ratio(line.logs, branchy),
                    f"{line.first / len(infos):.0%}",
                    f"{len(line.logs)}/{len(infos)}",
                    _mean([row.calls for row in line.submission.rows.values()]),
                    _mean([row.seconds for row in line.submission.rows.values()]),
                    card.date,
                ]
            )
        header = ["", "entry", "authors", "kind", "all", "branchy", "fastest", "feasible", "calls", "seconds", "date"]
        parts.append(f"## {budget[0].upper()}{budget[1:]}\n\n{markdown(header, body)}")
    return "\n".join([*parts, how])


def _ratio(logs: Mapping[str, float], names: Sequence[str]) -> str:
    values = [logs[name] for name in names if name in logs]
    if not values:
        return "-"
    low, high = interval(values, resamples=RESAMPLES)
    between = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
    return f"{math.exp(float(np.mean(values))):.4f}{between}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    mean = float(np.mean(known))
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
