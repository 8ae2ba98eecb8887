"""`cases_of`: the problems that ``rlplace train --problems`` names, as one source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlplace.agents.problems.cases import INDEX, SUFFIX, ProblemCase, is_branchy, load_cases
from rlplace.agents.problems.training import ALL_FAMILIES, SYNTHETIC, ZOO_FAMILIES, training_case
from rlplace.envs.base import CLUSTER, REFINEMENT, STRATEGY
from rlplace.errors import InputError, MissingError
from rlplace.problem import Problem

STREAMS = {"all": ALL_FAMILIES, "zoo": ZOO_FAMILIES, "synthetic": (SYNTHETIC,)}
"""Endless sets by name: zoo and transformers models and synthetic graphs; those without transformers; synthetic ones alone."""


@dataclass(frozen=True)
class CaseSource:
    """Problems by number.

    Attributes:
        name: Name of the source, for cards and messages.
        case: Builds the problem of a number, always the same one: a `ProblemCase`, a question of `rlplace/Strategy-v0` or a
            scenario of `rlplace/Cluster-v0`.
        count: Number of problems; None: endless.
    """

    name: str
    case: Callable[[int], Any]
    count: int | None

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while self.count is None or number < self.count:
            yield self.case(number)
            number += 1


def default_set() -> str:
    """Returns ``all``, or ``zoo`` where the transformers extra is not installed."""
    return "all" if find_spec("transformers") is not None else "zoo"


def cases_of(
    names: Sequence[str | Path], *, seed: int = 0, cluster: str | None = None, environment: str = REFINEMENT
) -> CaseSource:
    """Returns the source of the problems with these names.

    Args:
        names: One of `STREAMS` alone; or files ``*.problem.json`` and folders of them, any number. Empty: the
            default stream. In `rlplace/Strategy-v0` and `rlplace/Cluster-v0`: a set of `rlplace.agents.problems.questions`.
        seed: Seed of a stream.
        cluster: Text of the one cluster that the captured models of a stream are priced for.
        environment: Id of the environment that they are for.

    Raises:
        InputError: An unknown name, or a mixture of a stream and files.
        MissingError: The stream needs the transformers extra.
    """
    if environment in (STRATEGY, CLUSTER):
        from rlplace.agents.problems.questions import questions_of, scenario

        if len(names) > 1 or cluster is not None:
            raise InputError(f"{environment} takes one split of its questions as --problems, which have clusters of their own")
        title = str(names[0]) if names else "train"
        questions = questions_of(title)
        if environment == STRATEGY:
            return CaseSource(title, questions.__getitem__, len(questions))
        return CaseSource(title, lambda number: scenario(questions[number % len(questions)], seed, number), None)
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


def _read(name: str) -> list[ProblemCase]:
    """Returns the cases of a folder that `save_cases` wrote, or every problem of a folder or file."""
    path = Path(name)
    if path.is_dir():
        if (path / INDEX).is_file():
            return load_cases(path)[0]
        files = sorted(path.glob(f"*{SUFFIX}"))
        if not files:
            raise InputError(f"{path}: the folder holds no *{SUFFIX} file; make one with 'rlplace capture'")
    elif path.is_file():
        files = [path]
    else:
        known = ", ".join(STREAMS)
        raise InputError(f"unknown problem set {name!r}; known: {known}, or files and folders of *.problem.json")
    cases = []
    for file in files:
        problem = Problem.load(file)
        family = file.name.removesuffix(SUFFIX)
        cases.append(ProblemCase(family, family, problem, branchy=is_branchy(problem)))
    return cases
