"""A file of results, one JSON object a line: a header, then records, each on disk as soon as it is there.

A last line that was cut off is dropped, so that whatever writes such a file can be stopped at any moment and go on later.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.errors import InputError, show
from rlplace.files import check_header, check_output, parse_json, read_text, write_text
from rlplace.limits import FORMAT_BYTES

Entry = tuple[str, Any, str]
"""Kind and data of a record, and where it stands, for messages."""


class RowFile:
    """A file with a header and records of some kinds, which one process writes.

    Attributes:
        path: Where the file is.
        kinds: Names of the records.
    """

    def __init__(self, path: Path, format_name: str, version: int, kinds: Sequence[str]) -> None:
        check_output(path)
        self.path, self.kinds = path, tuple(kinds)
        self._format, self._version = format_name, version

    def rewrite(self, settings: Mapping[str, Any], entries: Iterable[tuple[str, Any]] = ()) -> None:
        """Writes header and records anew, the whole file or nothing."""
        header = {"format": self._format, "version": self._version, "settings": dict(settings)}
        write_text(self.path, "".join(_line(part) for part in (header, *({kind: data} for kind, data in entries))))

    def append(self, kind: str, data: Mapping[str, Any]) -> None:
        """Adds a record.

        Raises:
            InputError: The file cannot be written; it then ends where it ended before.
        """
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)  # the file is there: it has its header
            try:
                line = _line({kind: dict(data)}).encode()
                size = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):  # in one call, so that lines of two processes do not mix
                    os.ftruncate(handle, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror or error}") from None

    def read(self, *, repair: bool = True) -> tuple[Any, list[Entry]]:
        """The settings of the header, and the records in order.

        Args:
            repair: Also remove a last line that was cut off.

        Raises:
            InputError: The file is empty, damaged, or of another format.
        """
        text = read_text(self.path, FORMAT_BYTES.get(self._format))
        whole = text[: text.rfind("\n") + 1]
        if whole != text and repair:
            write_text(self.path, whole)
        lines = whole.splitlines()
        if not lines:
            raise InputError(f"{self.path}: holds no {self._format}; delete it, or choose another name")
        header = check_header(self._parse(lines[0], 1), self._format, self._version, str(self.path))
        return header.get("settings"), [self._entry(line, number) for number, line in enumerate(lines[1:], start=2)]

    def _entry(self, line: str, number: int) -> Entry:
        data, where = self._parse(line, number), f"{self.path}: line {number}"
        if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in self.kinds:
            raise InputError(f"{where}: expected one of {', '.join(self.kinds)}, found {show(data)}")
        kind, value = next(iter(data.items()))
        return kind, value, where

    def _parse(self, line: str, number: int) -> Any:
        try:
            return parse_json(line, f"{self.path}: line {number}")
        except InputError as error:
            raise InputError(f"{error}; start another file") from None


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False) + "\n"
