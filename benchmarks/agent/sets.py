"""The sets of cases by name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.agent.records import CaseInfo
from rlplace.agents.cases import Case, is_branchy
from rlplace.errors import unknown_name
from rlplace.problem.generate import random_problem


def _test() -> list[Case]:
    from rlplace.agents.problems import test_cases

    return test_cases(progress=_tell)


def _validation() -> list[Case]:
    from rlplace.agents.problems import validation_cases

    return validation_cases(progress=_tell)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def random_cases(count: int = 6, seed: int = 700_000) -> list[Case]:
    """Small random graphs, to try the benchmark itself; no result is claimed on them."""
    cases = []
    for number in range(count):
        shape = ("branchy", "chain", "layered")[number % 3]
        problem = random_problem(seed + number, 20 + 5 * number, 2 + number % 3, shape=shape, unlike=number % 2 == 1)
        cases.append(Case(f"random-{number}", f"random:{shape}", problem, is_branchy(problem), number % 2 == 1))
    return cases


SETS: dict[str, Callable[[], list[Case]]] = {"test": _test, "validation": _validation, "random": random_cases}


def load_set(name: str) -> list[Case]:
    """The cases of a set."""
    if name not in SETS:
        raise unknown_name("set of cases", name, SETS)
    return SETS[name]()


def describe(case: Case) -> CaseInfo:
    """The record of a case whose floor is not known yet."""
    return CaseInfo(
        name=case.name,
        family=case.family,
        fingerprint=case.problem.fingerprint,
        groups=case.problem.num_groups,
        ops=case.problem.num_ops,
        devices=case.problem.num_devices,
        branchy=case.branchy,
        unseen=case.unseen_cluster,
        floor_s=None,
        floor=None,
        floor_seconds=0.0,
        floor_calls=0,
    )
