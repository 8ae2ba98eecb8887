"""``*.steps.jsonl``: the step times of a training run, one JSON object a line, written by the run and followed by others.

The first line of a run is its header, ``{"format": "rlplace.steps", "version": 1, ...}``; a run that is started again adds
another one. Then comes ``{"step": n, "s": seconds, "at": unix_time}`` for every step, with ``"busy_s"`` per device where it is
known, and now and then ``{"event": text, ...}``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlplace.errors import InputError, show
from rlplace.files import check_header, check_keys, finite_number, open_regular, parse_json

FORMAT = "rlplace.steps"
VERSION = 1
MAX_LINE_BYTES = 1 << 16
MAX_FILE_BYTES = 16 << 20
"""A file that has grown to this is renamed to ``NAME.1``, over an older one, and a new one begun."""


@dataclass(frozen=True)
class StepHeader:
    """The run that the next lines belong to.

    Attributes:
        plan: Fingerprint of its plan.
        problem: Fingerprint of its problem.
        predicted_s: Step time that the plan predicts; None where it does not.
        continued: The run goes on in this file: the older one was renamed.
        reference_s: Of a continued run, what its steps are compared with, where it is known.
    """

    plan: str
    problem: str
    predicted_s: float | None = None
    continued: bool = False
    reference_s: float | None = None

    def line(self) -> str:
        """As text, with its end."""
        told = {key: value for key, value in asdict(self).items() if value is not None and value is not False}
        return json.dumps({"format": FORMAT, "version": VERSION, **told}) + "\n"


@dataclass(frozen=True)
class StepLine:
    """One step.

    Attributes:
        step: Number, from 0.
        seconds: It took.
        busy_s: Per device of the cluster the seconds that it computed; None where unknown.
    """

    step: int
    seconds: float
    busy_s: tuple[float, ...] | None = None


class StepsWriter:
    """Appends lines to a steps file in batches; a line is either whole or, after a crash, cut off at the end of the file.

    Attributes:
        path: Of the file.
    """

    def __init__(self, path: str | Path, header: StepHeader, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Opens the file, takes away half a line that a killed run has left at its end, and writes the header.

        Raises:
            OSError: The file cannot be written.
        """
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._header = header
        _mend(self.path)
        if self._full(0):
            os.replace(self.path, f"{self.path}.1")
        self._append(header.line())

    def _full(self, more: int) -> bool:
        return self.path.is_file() and self.path.stat().st_size + more > self._max_bytes

    def write(self, lines: list[str], reference_s: float | None = None) -> None:
        """Appends lines.

        Args:
            lines: Without their ends.
            reference_s: For the header of a new file, see `StepHeader`.

        Raises:
            OSError: The file cannot be written.
        """
        text = "".join(f"{line}\n" for line in lines)
        if self._full(len(text)):
            os.replace(self.path, f"{self.path}.1")
            text = replace(self._header, continued=True, reference_s=reference_s).line() + text
        if text:
            self._append(text)

    def _append(self, text: str) -> None:
        # Opened every time: no descriptor is kept that a forked process could write through.
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            view = text.encode()
            while view:
                view = view[os.write(handle, view) :]
        finally:
            os.close(handle)


def _mend(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    with os.fdopen(handle, "r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        start = max(0, size - MAX_LINE_BYTES)
        stream.seek(start)
        tail = stream.read()
        if tail and not tail.endswith(b"\n") and (b"\n" in tail or start == 0):
            stream.truncate(start + tail.rfind(b"\n") + 1)


class StepsReader:
    """Reads a steps file from its beginning and then what is added to it.

    Attributes:
        path: Of the file.
        line: Number of the last line that was read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.line = 0
        self._offset = 0
        self._inode: int | None = None
        self._headed = False

    def read(self) -> Iterator[StepHeader | StepLine]:
        """What was added since the last call; a last line without its end waits for the next call, events are left out.

        Raises:
            InputError: The file cannot be read, or a line is none of a steps file.
        """
        try:
            with open_regular(self.path) as stream:
                found = os.fstat(stream.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:  # another file by that name, as after rotation
                    self._inode, self._offset, self.line, self._headed = found.st_ino, 0, 0, False
                stream.seek(self._offset)
                while True:
                    text = stream.readline(MAX_LINE_BYTES + 1)
                    if len(text) > MAX_LINE_BYTES:
                        raise InputError(f"{self.path}: line {self.line + 1} is longer than {MAX_LINE_BYTES} bytes")
                    if not text.endswith(b"\n"):
                        return
                    self._offset += len(text)
                    self.line += 1
                    item = self._parse(text)
                    if item is not None:
                        yield item
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def _parse(self, text: bytes) -> StepHeader | StepLine | None:
        where = f"{self.path}: line {self.line}"
        try:
            data = parse_json(text.decode("utf-8"), where)
        except ValueError:
            raise InputError(f"{where}: not valid JSON; take the line out, or start the watch with a new file") from None
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: expected an object")
        if "format" in data:
            self._headed = True
            return _header(check_header(dict(data), FORMAT, VERSION, where), where)
        if not self._headed:
            raise InputError(f"{where}: the header of a steps file is missing; is this a file that StepWatch wrote?")
        if "event" in data:
            return None
        check_keys(data, {"step", "s"}, {"at", "busy_s"}, where)
        step = data["step"]
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 62:
            raise InputError(f"{where}: step is {show(step)}; expected a whole number from 0 up")
        busy = data.get("busy_s")
        if busy is not None and not isinstance(busy, list):
            raise InputError(f"{where}: busy_s must be a list of seconds")
        times = None if busy is None else tuple(_seconds(value, f"{where}: busy_s") for value in busy)
        return StepLine(step, _seconds(data["s"], f"{where}: s"), times)


def _header(data: dict[str, Any], where: str) -> StepHeader:
    check_keys(data, {"plan", "problem"}, {"predicted_s", "continued", "reference_s"}, where)
    if not isinstance(data["plan"], str) or not isinstance(data["problem"], str):
        raise InputError(f"{where}: plan and problem must be fingerprints")
    if not isinstance(data.get("continued", False), bool):
        raise InputError(f"{where}: continued must be true or false")
    times = {key: _positive(data[key], f"{where}: {key}") for key in ("predicted_s", "reference_s") if key in data}
    return StepHeader(data["plan"], data["problem"], continued=data.get("continued", False), **times)


def _positive(value: Any, where: str) -> float:
    number = _seconds(value, where)
    if number == 0:
        raise InputError(f"{where}: it must be positive")
    return number


def _seconds(value: Any, where: str) -> float:
    number = finite_number(value, where)
    if not 0 <= number < math.inf:
        raise InputError(f"{where}: {number} is negative")
    return number
