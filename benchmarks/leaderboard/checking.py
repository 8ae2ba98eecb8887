"""The check of a submission: every plan is simulated again, exactly, and must be what the submission says."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from benchmarks.agent.records import Budget
from benchmarks.leaderboard.records import Row, Submission
from rlplace.agents.problems.cases import ProblemCase
from rlplace.errors import InputError, unknown_name
from rlplace.simulator import simulate

SAME = 1e-12
"""Relative difference up to which a claimed and a simulated step time are the same: the simulator is exact."""

LATE = 1.1
"""Claimed seconds over those of the class up to which a run is in time: searches look at the clock between steps."""


def check_submission(submission: Submission, cases: Mapping[str, ProblemCase]) -> None:
    """Checks everything that can be checked of a submission.

    Args:
        submission: As it was read.
        cases: The cases of the board by name.

    Raises:
        InputError: Says which case is wrong, why, and what to do.
    """
    folder = submission.folder
    for name in submission.rows:
        if name not in cases:
            raise InputError(f"{folder}: {unknown_name('case', name, list(cases))}; the board has {len(cases)} cases")
    missing = [name for name in cases if name not in submission.rows]
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} of {len(cases)} cases have no row, first {missing[0]}; add a row each, with no devices "
            "and no step_time_s where the method has no plan"
        )
    for name, row in submission.rows.items():
        where = f"{folder}: {name}"
        _check_budget(row, submission.card.budget, where)
        _check_plan(row, cases[name], where)


def _check_budget(row: Row, budget: str, where: str) -> None:
    if budget == "one shot":
        return
    allowed = Budget.parse(budget)
    spent = row.calls if allowed.kind == "calls" else row.seconds
    what = "calls" if allowed.kind == "calls" else "seconds"
    if spent is None:
        raise InputError(f"{where}: {what} is missing, which the class {budget!r} needs; add what the run spent")
    if spent > allowed.value * (1.0 if what == "calls" else LATE):
        raise InputError(
            f"{where}: {spent:g} {what} are more than the class {budget!r} allows; run it again, or change the class"
        )


def _check_plan(row: Row, case: ProblemCase, where: str) -> None:
    problem = case.problem
    if row.problem != problem.fingerprint:
        raise InputError(
            f"{where}: its plan is for problem {row.problem[:12]}, the board's is {problem.fingerprint[:12]}; place the "
            "problems that `python -m benchmarks.leaderboard problems --out FOLDER` writes"
        )
    if row.devices is None or row.step_time_s is None:
        if row.devices is not None or row.step_time_s is not None:
            raise InputError(f"{where}: has only one of devices and step_time_s; give both, or neither where there is no plan")
        return
    if len(row.devices) != problem.num_groups:
        raise InputError(f"{where}: names {len(row.devices)} devices for {problem.num_groups} groups; name one for every group")
    if max(row.devices) >= problem.num_devices:
        raise InputError(f"{where}: names device {max(row.devices)}, the last one is {problem.num_devices - 1}")
    devices = np.array(row.devices, dtype=np.int32)
    line = simulate(problem, devices)
    if line.step_time_s is None or not math.isfinite(line.step_time_s):
        raise InputError(f"{where}: its step cannot complete: {'; '.join(line.violations)}; change the plan, or give none")
    if not line.feasible:
        raise InputError(f"{where}: its plan breaks the problem: {'; '.join(line.violations)}; change the plan, or give none")
    if abs(row.step_time_s - line.step_time_s) > SAME * line.step_time_s:
        raise InputError(
            f"{where}: claims a step of {row.step_time_s!r} s, its plan takes {line.step_time_s!r} s; write what "
            "rlplace.simulator.simulate says, with all digits, and check the order of the groups"
        )
