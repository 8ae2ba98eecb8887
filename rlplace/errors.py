"""Errors of rlplace: each carries the exit code that the command line ends with.

Every message is one line that says what is wrong, where, and what to do next.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
_MOST = 1000
"""Most characters of a message: names in files may be very long."""


class RlplaceError(Exception):
    """Base of all errors that rlplace raises on purpose.

    Messages quote files that came from anywhere: what would break the line or speak to the terminal is written as an escape.
    """

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(one_line(item) if isinstance(item, str) else item for item in args))


class InputError(RlplaceError, ValueError):
    """A file, option, name or argument cannot be used as it is."""

    exit_code = 2


class CaptureError(RlplaceError):
    """No capture method could record the model's training step."""


class InfeasibleError(RlplaceError):
    """No plan satisfies the constraints.

    Attributes:
        device: Name of the device that is short of memory, or None when another constraint fails.
        short_bytes: Bytes missing on that device, or in total when `device` is None.
    """

    exit_code = 3

    def __init__(self, message: str, *, device: str | None = None, short_bytes: int = 0) -> None:
        super().__init__(message)
        self.device = device
        self.short_bytes = short_bytes


class MissingError(RlplaceError):
    """Hardware or an optional dependency is missing; the message says what to install."""

    exit_code = 4


def one_line(text: str) -> str:
    """Returns text as one line of printable characters, shortened to a readable length."""
    if len(text) > _MOST:
        text = f"{text[: _MOST - 103]}...{text[-100:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in text)


def show(value: Any, limit: int = 80) -> str:
    """Returns any value for a message: short, on one line, and safe for nested data and integers beyond Python's digit
    limit.
    """
    try:
        text = _REPR.repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def whole_number(value: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """Returns a whole number within a range, also numpy's; truth values are refused.

    Args:
        value: The value to check.
        what: Start of the message, for example ``"rescale: samples"``.
        least: Smallest valid number.
        most: Largest valid number; None: no limit.

    Raises:
        InputError: The value is something else.
    """
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < least or (most is not None and number > most):
        span = f"from {least} up" if most is None else f"from {least} to {most}"
        raise InputError(f"{what} must be a whole number {span}, found {show(value)}")
    return number


def unknown_name(what: str, name: Any, known: Iterable[str]) -> InputError:
    """Builds the error for an unknown name, with the nearest known one.

    Args:
        what: Kind of the name, for example ``"planner"``.
        name: The unknown name.
        known: All valid names.
    """
    choices = sorted(known)
    near = [choice for choice in choices if isinstance(name, str) and choice.startswith(f"{name}-")]  # a100: a100-40g, a100-80g
    if not near and isinstance(name, str):
        near = difflib.get_close_matches(name[:80], choices, n=1, cutoff=0.5)
    some = [*choices[:40], "..."] if len(choices) > 40 else choices
    listed = ", ".join(some)
    hint = (
        f"did you mean {' or '.join(map(show, near[:8]))}?"
        if near
        else "known: " + (listed if len(listed) <= 400 else f"{listed[:397]}...")
    )
    return InputError(f"unknown {what} {show(name)}; {hint}")
