"""`cases_of`: what ``rlplace train --problems`` names, as one source of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rlplace.agents.cases import Case
from rlplace.agents.problems.files import load_problem_cases
from rlplace.agents.problems.training import ALL_FAMILIES, SYNTHETIC, ZOO_FAMILIES, training_case
from rlplace.errors import InputError, MissingError
from rlplace.planners.common.evaluate import PLAIN, Execution

STREAMS = {"all": ALL_FAMILIES, "zoo": ZOO_FAMILIES, "synthetic": (SYNTHETIC,)}
"""Endless sets by name: zoo and transformers models and synthetic graphs; those without transformers; synthetic ones alone."""


@dataclass(frozen=True)
class CaseSource:
    """Cases by number.

    Attributes:
        name: What it was asked for, for cards and messages.
        case: Makes the case of a number; the same number always gives the same case.
        count: Numbers are below it; None: there is no end.
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


def cases_of(
    names: Sequence[str | Path],
    *,
    seed: int = 0,
    cluster: str | None = None,
    executions: Sequence[Execution] = (PLAIN,),
) -> CaseSource:
    """The cases that a person names.

    Args:
        names: One of `STREAMS` alone; or files ``*.problem.json`` and folders of them, any number. Empty: the
            default stream.
        seed: Seed of a stream.
        cluster: Text of the one cluster that the captured models of a stream are priced for.
        executions: How the steps of problem files are executed; folders that `save_cases` wrote say it themselves.

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
    cases = [case for name in asked for case in _read(name, executions)]
    return CaseSource(title, cases.__getitem__, len(cases))


def _read(name: str, executions: Sequence[Execution]) -> list[Case]:
    if not Path(name).exists():
        known = ", ".join(STREAMS)
        raise InputError(f"unknown problem set {name!r}; known: {known}, or files and folders of *.problem.json")
    return load_problem_cases(name, executions)
