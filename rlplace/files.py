"""Files read and written: atomic, limited in size, JSON of a known format; large reads without garbage collection.

Reading and writing of rlplace's versioned JSON files.

Reading is strict and never runs code: duplicate or unknown keys, NaN, deep nesting, truncated text, files of a newer version,
too large (`rlplace.limits`) and irregular files are each refused with one line. Writing goes to a temporary
name in the same folder and is renamed when complete, so that a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from rlplace import limits
from rlplace.errors import InputError, show, unknown_name, whole_number

Record = TypeVar("Record")

MAX_FILE_BYTES = limits.FILE_BYTES
"""Larger files are refused before they are read."""

_CHUNK_BYTES = 1 << 20


def cache_folder() -> Path | None:
    """Returns the folder of cached results: ``$RLPLACE_CACHE`` (0: None, no cache) or ``rlplace`` in the user's cache."""
    named = os.environ.get("RLPLACE_CACHE")
    if named == "0":
        return None
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlplace"


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """Reads a regular file: devices, pipes and sockets, which may have no end, are refused, and nothing waits for a writer.

    Args:
        path: The file.
        most: Its largest size in bytes; None: `MAX_FILE_BYTES`.

    Raises:
        InputError: It cannot be read, is no regular file, or is too large.
    """
    most = MAX_FILE_BYTES if most is None else most
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > most:
                raise InputError(f"{path}: file has {size} bytes, the limit is {most}")
            payload = stream.read(size + 1)
            while len(payload) > size:  # it grows, or does not tell its size
                more = stream.read(_CHUNK_BYTES)
                payload += more
                if len(payload) > most:
                    raise InputError(f"{path}: file has more than {most} bytes, which is the limit")
                if not more:
                    break
            return payload
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file to read bytes, if it is a regular one.

    Raises:
        InputError: It is not a regular file, or its name holds a null character.
        OSError: It cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise InputError(f"{show(str(path))}: cannot be read: {error}") from None
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{path}: is {_kind(mode)}, not a regular file")
        with os.fdopen(handle, "rb", closefd=False) as stream:
            yield stream
    finally:
        os.close(handle)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def read_text(path: str | Path, most: int | None = None) -> str:
    """Reads a UTF-8 text file; see `read_bytes`."""
    try:
        return read_bytes(path, most).decode("utf-8")
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
    most = limits.FORMAT_BYTES.get(format_name, limits.FILE_BYTES)
    data = parse_json(read_text(path, most), where=str(path), most=most)
    return check_header(data, format_name, version, where=str(path))


def parse_json(text: str, where: str, most: int | None = None) -> Any:
    """Parses JSON text without leniency: duplicate keys, NaN, numbers beyond floats and deep nesting are refused.

    Args:
        text: The text.
        where: Start of the message.
        most: Largest size in bytes, which also limits the number of values; None: `MAX_FILE_BYTES`.

    Raises:
        InputError: It is not valid JSON, or holds too many values.
    """
    values = text.count(",") + text.count("[") + text.count("{")  # at least as many as there are
    allowed = (MAX_FILE_BYTES if most is None else most) // limits.BYTES_PER_VALUE
    if values > allowed:
        raise InputError(f"{where}: holds about {values} values, the limit is {allowed}")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys, parse_float=_finite_float)
    except RecursionError:
        raise InputError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}") from None


def read_record(path: str | Path, format_name: str, version: int, parse: Callable[[dict[str, Any]], Record]) -> Record:
    """Reads a file of a format and builds its record.

    Args:
        path: The file.
        format_name: Expected format.
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
    name = data.get("format")
    if name != format_name:
        raise InputError(f"{where}: expected format {format_name!r}, found {show(name)}")
    number = whole_number(data.get("version"), f"{where}: version", 1)
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
    """Returns a number of parsed JSON or TOML as a finite float; truth values, text, integers too large for a float are
    refused.
    """
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
    """Serialises to JSON with sorted keys and no spaces: the form of which fingerprints are computed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(data: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the canonical JSON of `data` without the keys `name` and `source`."""
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
    _check_name(path)
    try:
        mode = path.stat().st_mode if path.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            what = "Is a directory" if stat.S_ISDIR(mode) else f"it is {_kind(mode)}, not a regular file"
            raise InputError(f"{path}: cannot be written: {what}")
        if not path.parent.is_dir():
            raise InputError(f"{path}: cannot be written: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise InputError(f"{path}: cannot be written: the folder {path.parent} is read-only")
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise InputError(f"{show(str(path))}: cannot be written: {error.strerror or error}") from None


def _check_name(path: Path) -> None:
    if "\0" in str(path):
        raise InputError(f"{show(str(path))}: cannot be written: embedded null byte")


def check_folder(path: str | Path) -> None:
    """Refuses a folder that cannot be created or written, before the work whose result would be lost; creates nothing."""
    path = Path(path)
    _check_name(path)
    try:
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: cannot be written: it is a file, not a folder")
        nearest = path.absolute()
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        if not nearest.is_dir():
            raise InputError(f"{path}: cannot be written: {nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise InputError(f"{path}: cannot be written: the folder {nearest} is read-only")
    except OSError as error:
        raise InputError(f"{show(str(path))}: cannot be written: {error.strerror or error}") from None


def write_bytes(path: str | Path, payload: bytes) -> None:
    """Writes a binary file atomically: all bytes or none appear under `path`."""
    path = Path(path)
    write_files(path.parent, {path.name: payload})


def write_files(folder: str | Path, payloads: Mapping[str, bytes]) -> None:
    """Writes files of a folder that belong together: each appears whole, and none before all are on the disk.

    Args:
        folder: An existing folder.
        payloads: Contents by name, in the order in which they appear.

    Raises:
        InputError: The disk is full, the folder cannot be written, ...; then all files are as they were.
    """
    folder = Path(folder)
    written: list[tuple[str, Path]] = []
    path = folder
    try:
        for name, payload in payloads.items():
            path = folder / name
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name[:100]}.", suffix=".tmp")
            written.append((temporary, path))
            with os.fdopen(handle, "wb") as stream:
                stream.write(payload)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
        for temporary, path in written:
            os.replace(temporary, path)
    except BaseException as error:
        for temporary, _ in written:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
        if isinstance(error, ValueError) and not isinstance(error, InputError):  # a null character in the path
            raise InputError(f"{show(str(path))}: cannot be written: {error}") from None
        raise


@contextlib.contextmanager
def locked(folder: str | Path, *, shared: bool = False, patience_s: float = 10.0) -> Iterator[None]:
    """Keeps other processes from a folder's files that belong together, while they are written or read.

    The lock is on the folder itself, and ends with the process. Where a file system has no locks, or a process keeps one for
    longer than `patience_s`, this goes on without: readers must check in any case that the files belong together.
    """
    handle = None
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            end_s = time.monotonic() + patience_s
            while True:
                try:
                    fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end_s:
                        break
                    time.sleep(0.005)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that rlplace accepts")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {show(key)} appears twice")
            seen.add(key)
    return result


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Suspends garbage collection inside: for code that makes a great many objects, hardly any of them garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keeps objects that exist already out of collections inside: for code that makes many objects beside a large heap."""
    before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()
