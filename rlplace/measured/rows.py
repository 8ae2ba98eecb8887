"""Trials as rows of a database, checked the same way when written and when read."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from rlplace.cost.timings import MODES, PlaceTiming
from rlplace.errors import InputError, show, unknown_name, whole_number
from rlplace.files import canonical_json, finite_number, parse_json
from rlplace.measured.site import MAX_NAME, check_fingerprint, check_text
from rlplace.measured.trial import STATUSES, Trial
from rlplace.records import build, plain

COLUMNS = (
    "problem", "site", "run", "anchor", "status", "microbatches", "schedule", "mode", "engine", "began_at", "setup_s",
    "predicted_s", "device_of_group", "priority", "step_s", "places", "reason",
)  # fmt: skip
"""Columns of the table `trials`, in the order of the values of `trial_to_row`."""

MAX_GROUPS = 1 << 20
MAX_OPS = 1 << 21
MAX_STEPS = 1 << 20
MAX_PLACES = 4096
MAX_DEVICES = 4096
MAX_MICROBATCHES = 1 << 31
MAX_REASON = 4000
_MAX_SECONDS = 1e18
_MAX_PLACES_TEXT = 1 << 22


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
        values = {column: getattr(trial, column) for column in COLUMNS} | {
            "anchor": int(trial.anchor),
            "microbatches": operator.index(trial.microbatches),
            "began_at": _plain(trial.began_at),
            "setup_s": _plain(trial.setup_s),
            "predicted_s": None if trial.predicted_s is None else _plain(trial.predicted_s),
            "device_of_group": canonical_json([operator.index(device) for device in trial.device_of_group]),
            "priority": None if trial.priority is None else canonical_json([_plain(p) for p in trial.priority]),
            "step_s": canonical_json([_plain(step) for step in trial.step_s]),
            "places": canonical_json(plain(trial.places)),
            "engine": _one_line(trial.engine, MAX_NAME),
            "reason": _one_line(trial.reason, MAX_REASON),
        }
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
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
    value: Mapping[str, Any] = dict(zip(COLUMNS, row, strict=True))
    texts = {key: check_text(value[key], f"{where}.{key}") for key in ("run", "status", "schedule", "mode")}
    for key, known in (("status", STATUSES), ("mode", MODES)):
        if texts[key] not in known:
            raise InputError(f"{where}: {unknown_name(key, texts[key], known)}")
    steps = _numbers(value["step_s"], MAX_STEPS, f"{where}.step_s")
    if steps and not (0 < min(steps) and max(steps) < _MAX_SECONDS):
        raise InputError(f"{where}.step_s: a step takes more than no time and less than {_MAX_SECONDS:g} seconds")
    timed = texts["status"] in ("done", "dropped")
    if bool(steps) != timed:
        raise InputError(f"{where}: a trial that is {texts['status']} has {'' if timed else 'no '}step times")
    priority = value["priority"]
    return Trial(
        problem=check_fingerprint(value["problem"], f"{where}.problem"),
        site=check_fingerprint(value["site"], f"{where}.site") if value["site"] != "" else "",
        device_of_group=_devices(value["device_of_group"], f"{where}.device_of_group"),
        microbatches=whole_number(value["microbatches"], f"{where}.microbatches", 1, MAX_MICROBATCHES),
        step_s=steps,
        places=_places(value["places"], f"{where}.places"),
        predicted_s=None if value["predicted_s"] is None else _seconds(value["predicted_s"], f"{where}.predicted_s"),
        priority=None if priority is None else _numbers(priority, MAX_OPS, f"{where}.priority"),
        setup_s=_seconds(value["setup_s"], f"{where}.setup_s"),
        began_at=_seconds(value["began_at"], f"{where}.began_at"),
        engine=_one_line(check_text(value["engine"], f"{where}.engine"), MAX_NAME),
        reason=_one_line(check_text(value["reason"], f"{where}.reason", MAX_REASON), MAX_REASON),
        anchor=bool(whole_number(value["anchor"], f"{where}.anchor", 0, 1)),
        **texts,
    )


def plan_key(key: tuple[Any, ...]) -> str:
    """Digest of `Trial.key`, which an index can find."""
    return hashlib.sha256(canonical_json(key).encode()).hexdigest()


def _seconds(value: Any, where: str) -> float:
    number = finite_number(value, where)
    if not 0 <= number < _MAX_SECONDS:
        raise InputError(f"{where}: {number:g} is outside 0..{_MAX_SECONDS:g} seconds")
    return number


def _devices(text: Any, where: str) -> tuple[int, ...]:
    values = _flat(text, MAX_GROUPS, where)
    if not all(type(value) is int for value in values) or (values and not 0 <= min(values) <= max(values) < MAX_DEVICES):
        raise InputError(f"{where}: expected device numbers in 0..{MAX_DEVICES - 1}")
    return tuple(values)


def _numbers(text: Any, limit: int, where: str) -> tuple[float, ...]:
    return tuple(finite_number(value, where) for value in _flat(text, limit, where))


def _flat(text: Any, limit: int, where: str) -> list[Any]:
    """A JSON list of numbers; what is nested or too long is refused before it takes memory."""
    if not isinstance(text, str) or not text.startswith("[") or text.count("[") > 1 or "{" in text or '"' in text:
        raise InputError(f"{where}: expected a list of numbers as JSON text")
    if text.count(",") >= limit:
        raise InputError(f"{where}: more than {limit} numbers")
    return parse_json(text, where)


def _places(text: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(text, str) or len(text) > _MAX_PLACES_TEXT:
        raise InputError(f"{where}: expected a list as JSON text")
    return build(Annotated[tuple[PlaceTiming, ...], Meta(max_length=MAX_PLACES)], parse_json(text, where), where)


def _plain(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"expected a number, found {show(value)}")
    return float(value) + 0.0  # no negative zero, whose text differs from that of zero


def _one_line(text: str, limit: int) -> str:
    """Text as a terminal can show it; lone halves of surrogate pairs are not printable either."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:limit].rstrip()
