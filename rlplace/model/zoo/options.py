"""Options of a model spec: ``NAME,key=value,...`` as text, parsed against the type of a default value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlplace.errors import InputError, show, unknown_name

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """Splits ``name,key=value,...`` into the name and its options.

    Raises:
        InputError: An option has no ``=``, no name, or appears twice.
    """
    name, *parts = text.split(",")
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"model {show(text, 120)}: expected key=value after the name, found {show(part, 40)}")
        if key in options:
            raise InputError(f"model {show(text, 120)}: option {show(key)} appears twice")
        options[key] = value.strip()
    return name.strip(), options


def config_file(model: str) -> Path | None:
    """Returns the configuration that ``hf:PATH[,key=value...]`` names, a JSON file or a folder with a ``config.json``; None: no
    path.

    Args:
        model: MODEL text.
    """
    kind, _, rest = model.partition(":")
    name = rest.partition(",")[0].strip()
    path = Path(name)
    if kind != "hf" or not ("/" in name or name.endswith(".json")):
        return None
    return path / "config.json" if path.is_dir() else path if path.is_file() else None


def parse_options(
    options: Mapping[str, str], defaults: Mapping[str, Any], where: str, extra: Iterable[str] = ()
) -> dict[str, Any]:
    """Parses option texts against the types of their defaults.

    Args:
        options: Texts by name.
        defaults: All known options with a value of the right type; None accepts any number, truth value or text.
        where: Model of the options, for messages.
        extra: Further known names, without a default.

    Returns:
        Values by name, only for the options in `options`.

    Raises:
        InputError: Unknown option (with the nearest known one), or a text that is not of the right type.
    """
    known = {**dict.fromkeys(extra), **defaults}
    result = {}
    for key, text in options.items():
        if key not in known:
            raise unknown_name(f"option of {where}", key, known)
        result[key] = _parse(text, known[key], f"{where}: option {key}")
    return result


def _parse(text: str, default: Any, where: str) -> Any:
    if isinstance(default, bool):
        return _boolean(text, where)
    if isinstance(default, int):
        return _number(text, int, where, "a whole number")
    if isinstance(default, float):
        return _number(text, float, where, "a number")
    if isinstance(default, str):
        return text
    if isinstance(default, (list, tuple)):
        like = default[0] if default else None
        return type(default)(_parse(item, like, where) for item in text.split("/"))
    if default is None:
        return guessed(text)
    raise InputError(f"{where}: cannot be given as text (it is a {type(default).__name__})")


def _boolean(text: str, where: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise InputError(f"{where}: {show(text, 40)} is not true or false")


def _number(text: str, kind: type[Any], where: str, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise InputError(f"{where}: {show(text, 40)} is not {what}") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise InputError(f"{where}: {show(text, 40)} is not finite")
    return value


def guessed(text: str) -> Any:
    """Returns a text as a number, a truth value, None or text, by its form."""
    lower = text.lower()
    if lower in ("none", "null"):
        return None
    if lower in ("true", "false"):
        return lower == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
