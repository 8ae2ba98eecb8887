"""Reading and writing of rlplace's versioned JSON files.

Reading is strict and never runs code: duplicate or unknown keys, NaN, deep nesting, truncated text and files of a newer
version are each refused with one line. Writing goes to a temporary name in the same folder and is renamed when complete,
so that a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rlplace.errors import InputError, show, unknown_name

Record = TypeVar("Record")

MAX_FILE_BYTES = 1 << 30
"""Larger files are refused before they are read."""


def read_bytes(path: str | Path) -> bytes:
    """Reads a file of at most `MAX_FILE_BYTES`; devices such as /dev/zero are refused."""
    try:
        with open(path, "rb") as stream:
            found = os.fstat(stream.fileno())
            if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
                raise InputError(f"{path}: is a device, not a file")
            if found.st_size > MAX_FILE_BYTES:
                raise InputError(f"{path}: file has {found.st_size} bytes, the limit is {MAX_FILE_BYTES}")
            return stream.read()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a null character in the path
        raise error if isinstance(error, InputError) else InputError(f"{show(str(path))}: cannot be read: {error}") from None


def read_text(path: str | Path) -> str:
    """Reads a UTF-8 text file of at most `MAX_FILE_BYTES`."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a UTF-8 text file (byte {error.start})") from None


def read_json(path: str | Path, format_name: str, version: int) -> dict[str, Any]:
    """Reads a versioned JSON file and checks its `format` and `version`.

    Args:
        path: File to read.
        format_name: Expected value of the key `format`, for example ``"rlplace.plan"``.
        version: Newest version that this code understands.

    Returns:
        The top-level object without the keys `format` and `version`.

    Raises:
        InputError: The file is missing, malformed, of another format or of a newer version.
    """
    return check_header(parse_json(read_text(path), where=str(path)), format_name, version, where=str(path))


def parse_json(text: str, where: str) -> Any:
    """Parses JSON text without leniency: duplicate keys, NaN and deep nesting are refused."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise InputError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}") from None


def read_record(path: str | Path, format_name: str, version: int, parse: Callable[[dict[str, Any]], Record]) -> Record:
    """Reads a file of a format and builds what it describes.

    Args:
        path: The file.
        format_name: Its format.
        version: The newest version that `parse` understands.
        parse: Builds the record from the data without its header; its errors then name the file.

    Raises:
        InputError: The file is missing, malformed or newer than this code, or `parse` refuses it.
    """
    data = read_json(path, format_name, version)
    try:
        return parse(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def check_header(data: Any, format_name: str, version: int, where: str) -> dict[str, Any]:
    """Checks `format` and `version` of parsed JSON and returns the rest as a new dict."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(data).__name__}")
    found = data.get("format")
    if found != format_name:
        raise InputError(f"{where}: expected format {format_name!r}, found {show(found)}")
    number = data.get("version")
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"{where}: version must be a positive integer, found {show(number)}")
    if number > version:
        raise InputError(
            f"{where}: written as {format_name} version {show(number)}, this rlplace reads up to {version}; upgrade rlplace"
        )
    return {key: value for key, value in data.items() if key not in ("format", "version")}


def check_keys(data: Any, required: Collection[str], optional: Collection[str], where: str) -> None:
    """Refuses anything but an object with all `required` keys and no key outside `optional`."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: expected an object, found {type(data).__name__}")
    for key in data:
        if key not in required and key not in optional:
            raise InputError(f"{where}: {unknown_name('key', key, [*required, *optional])}")
    for key in required:
        if key not in data:
            raise InputError(f"{where}: key {key!r} is missing")


def finite_number(value: Any, where: str) -> float:
    """A number of parsed JSON or TOML as a finite float; truth values, text, integers too large for a float are refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}: expected a number, found {show(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise InputError(f"{where}: the number is too large") from None
    if not math.isfinite(number):
        raise InputError(f"{where}: {number} is not a finite number")
    return number


def canonical_json(data: Any) -> str:
    """Serialises to JSON with sorted keys and no spaces: the form that fingerprints are taken of."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(data: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of `data` without the keys `name` and `source`."""
    kept = {key: value for key, value in data.items() if key not in ("name", "source")}
    return hashlib.sha256(canonical_json(kept).encode()).hexdigest()


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Writes `data` as JSON, atomically."""
    write_text(path, json.dumps(data, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file atomically: the whole text or nothing appears under `path`."""
    write_bytes(path, text.encode("utf-8"))


def check_output(path: str | Path) -> None:
    """Refuses a path that cannot be written, before the work whose result would be lost."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: cannot be written: Is a directory")
    if not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written: the folder {path.parent} is read-only")


def write_bytes(path: str | Path, payload: bytes) -> None:
    """Writes a binary file atomically: all bytes or none appear under `path`."""
    path = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as stream:
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that rlplace accepts")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice")
            seen.add(key)
    return result
