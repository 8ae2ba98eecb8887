"""Trials as rows of a database, checked the same way when written and when read; columns that are lists hold JSON text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from rlplace.errors import InputError, show, whole_number
from rlplace.files import canonical_json, parse_json
from rlplace.limits import BYTES_PER_VALUE, DEVICES
from rlplace.measured.trial import MAX_GROUPS, MAX_NAME, MAX_REASON, MAX_STEPS, Trial
from rlplace.records import build, plain

COLUMNS = Trial.__struct_fields__
"""Columns of the table `trials`, in the order of the values of `trial_to_row`."""

_LISTS = {"device_of_group": MAX_GROUPS, "step_s": MAX_STEPS, "places": 16 * DEVICES}
"""Columns of JSON text, and how many values they may hold."""

_LINES = {"engine": MAX_NAME, "reason": MAX_REASON}


def trial_to_row(trial: Trial) -> tuple[tuple[Any, ...], Trial]:
    """The values of `COLUMNS` for a trial, and the trial as it will be read.

    Numbers of numpy become plain ones. Engine and reason, which are for people, become one line of limited length: a
    measurement is not lost for what its message looks like.

    Raises:
        InputError: A value is of a wrong type or out of range.
    """
    if not isinstance(trial, Trial):
        raise InputError(f"trial: expected a Trial, found {type(trial).__name__}")
    try:
        values = {column: plain(getattr(trial, column)) for column in COLUMNS} | {"anchor": int(trial.anchor)}
        values |= {key: canonical_json(values[key]) for key in _LISTS}
        values |= {key: _one_line(values[key], limit) for key, limit in _LINES.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"trial: a value is not of the right type: {show(str(error))}") from None
    row = tuple(values[column] for column in COLUMNS)
    return row, trial_from_row(row, "trial")


def trial_from_row(row: Iterable[Any], where: str) -> Trial:
    """Builds a trial from the values of `COLUMNS`.

    Args:
        row: As the database gives them: anything.
        where: For messages.

    Raises:
        InputError: A value is of a wrong type or out of range.
    """
    value = dict(zip(COLUMNS, row, strict=True))
    for key, limit in _LISTS.items():
        if not isinstance(value[key], str):
            raise InputError(f"{where}: {key}: expected a list as JSON text")
        value[key] = parse_json(value[key], f"{where}: {key}", most=limit * BYTES_PER_VALUE)
    value["anchor"] = bool(whole_number(value["anchor"], f"{where}: anchor", 0, 1))
    trial = build(Trial, value, where)
    timed = trial.status in ("done", "dropped")
    if bool(trial.step_s) != timed:
        raise InputError(f"{where}: a trial that is {trial.status} has {'' if timed else 'no '}step times")
    if any(_one_line(value[key], limit) != value[key] for key, limit in _LINES.items()):
        raise InputError(f"{where}: engine and reason are single lines of text that can be shown")
    return trial


def plan_key(trial: Trial) -> str:
    """Digest of what has to agree for two trials to be of the same plan under the same conditions."""
    key = (trial.problem, trial.site, trial.device_of_group, trial.mode)
    return hashlib.sha256(canonical_json(key).encode()).hexdigest()


def _one_line(text: str, limit: int) -> str:
    """Text as a terminal can show it; lone halves of surrogate pairs are not printable either."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:limit].rstrip()
