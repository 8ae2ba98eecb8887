"""Checks of single values that come from a database or a caller."""

from __future__ import annotations

from typing import Any

from rlplace.errors import InputError, show

MAX_NAME = 1000


def check_text(value: Any, where: str, limit: int = MAX_NAME) -> str:
    """Text of at most `limit` characters that UTF-8 can hold."""
    if not isinstance(value, str):
        raise InputError(f"{where}: expected text, found {show(value)}")
    if len(value) > limit:
        raise InputError(f"{where}: text of {len(value)} characters, the limit is {limit}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: {show(value)} cannot be written as UTF-8") from None
    return value


def check_fingerprint(value: Any, where: str) -> str:
    """A SHA-256 in lower-case hexadecimal digits."""
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise InputError(f"{where}: {show(value)} is not a fingerprint")
    return value
