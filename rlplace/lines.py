"""`LineFile`: a file of JSON lines, a header and then one line an entry, each on disk as soon as it is there.

A last line that was cut off does not count; one that only lacks its end does.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.errors import InputError, show
from rlplace.files import check_header, parse_json, read_text, write_text
from rlplace.limits import FORMAT_BYTES

Entry = tuple[Any, str]
"""Data of a line, and where it stands, for messages."""


class LineFile:
    """A file that one process writes.

    Attributes:
        path: Where the file is.
    """

    def __init__(self, path: str | Path, format_name: str, version: int) -> None:
        self.path = Path(path)
        self._format, self._version = format_name, version

    def begin(self, **header: Any) -> None:
        """Writes the header, anew."""
        write_text(self.path, _line({"format": self._format, "version": self._version, **header}))

    def append(self, entry: Mapping[str, Any]) -> None:
        """Adds a line.

        Raises:
            InputError: The file cannot be written; it then ends where it ended before.
        """
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)  # the file is there: it has its header
            try:
                line = _line(entry).encode()
                size = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):  # in one call, so that lines of two processes do not mix
                    os.ftruncate(handle, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror or error}") from None

    def read(self, *, repair: bool = True) -> tuple[dict[str, Any] | None, list[Entry]]:
        """Returns the header, None in a file without a line, and the entries in order.

        Args:
            repair: Also remove a last line that was cut off.

        Raises:
            InputError: The file is damaged, or of another format.
        """
        text = read_text(self.path, FORMAT_BYTES.get(self._format))
        whole = text[: text.rfind("\n") + 1]
        if last := text[len(whole) :]:
            whole += f"{last}\n" if _is_json(last) else ""
        if whole != text and repair:
            write_text(self.path, whole)
        entries = []
        for number, line in enumerate(whole.splitlines(), start=1):
            where = f"{self.path}: line {number}"
            try:
                entries.append((parse_json(line, where), where))
            except InputError as error:
                raise InputError(f"{error}; start another file") from None
        header = check_header(entries[0][0], self._format, self._version, entries[0][1]) if entries else None
        return header, entries[1:]

    def records(self, kinds: Sequence[str], *, repair: bool = True) -> tuple[Any, list[tuple[str, Any, str]]]:
        """Returns the settings of the header; and kind, data and place of the entries, which have one key, their kind.

        Raises:
            InputError: As `read`; the file is empty, or an entry is of no kind.
        """
        header, entries = self.read(repair=repair)
        if header is None:
            raise InputError(f"{self.path}: holds no {self._format}; delete it, or choose another name")
        for data, where in entries:
            if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in kinds:
                raise InputError(f"{where}: expected one of {', '.join(kinds)}, found {show(data)}")
        return header.get("settings"), [(*next(iter(data.items())), where) for data, where in entries]


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False) + "\n"


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
