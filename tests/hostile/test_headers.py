"""What all JSON formats refuse alike: other headers, text that is no such file, unknown keys, values of another type."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hostile.targets import TARGETS
from rlplace.errors import InputError

NAMES = (
    "problem", "plan", "op graph", "costs", "measurement", "timings", "batch curve", "cases", "agent config", "training facts",
    "site",
)  # fmt: skip
FREE = {
    "source", "environment", "details", "facts", "extra", "training", "made_by", "capture", "settings", "torch", "scheduler",
    "format", "version",
}  # fmt: skip
"""Keys under which anything may stand, and the header."""
MAPS = {"dims", "kinds", "shards", "op_dims", "parts", "predicted"}
"""Keys of objects whose own keys are names or numbers, or that take more than is known."""


def refused(name: str, scratch: Path, file: str, content: Any, message: str | None = None) -> None:
    """A loader refuses a file with one line that names it, where what is loaded is a file of its own."""
    path = scratch / file
    before = path.read_text()
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    try:
        with pytest.raises(InputError, match=message) as caught:
            TARGETS[name].use(path, scratch)
    finally:
        path.write_text(before)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert path.name in str(caught.value) or name in ("site", "cases")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": None}, "expected format"),
        ({"format": "rlplace.other"}, "expected format"),
        ({"format": 3}, "expected format"),
        ({"version": 99}, "upgrade rlplace"),
        ({"version": True}, "version must be a whole number from 1 up"),
        ({"version": "1"}, "version must be a whole number from 1 up"),
        ({"version": 0}, "version must be a whole number from 1 up"),
    ],
)
@pytest.mark.parametrize("name", [*NAMES, "comparison"])
def test_headers(name, scratch, change, message):
    file = TARGETS[name].files[0]
    data = json.loads((scratch / file).read_text()) | change
    refused(name, scratch, file, {key: value for key, value in data.items() if value is not None}, message)


@pytest.mark.parametrize("name", [*NAMES, "comparison"])
def test_texts_that_are_no_such_file(name, scratch):
    file = TARGETS[name].files[0]
    good = (scratch / file).read_text().strip()
    for text in ("[]", "null", '"x"'):
        refused(name, scratch, file, text, "expected a JSON object")
    for text in (good[: len(good) // 2], ""):
        refused(name, scratch, file, text, "not valid JSON")
    refused(name, scratch, file, '{"version": 1, ' + good[1:], "appears twice")
    refused(name, scratch, file, '{"x": NaN, ' + good[1:], "NaN")
    refused(name, scratch, file, "[" * 100_000, "nested too deeply")


def places(data: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Ways to the values whose types a format says, and the values; of a list the first."""
    yield way, data
    items = data.items() if isinstance(data, dict) else list(enumerate(data))[:1] if isinstance(data, list) else ()
    for key, value in items:
        if key not in FREE:
            yield from places(value, (*way, key))


def changed(data: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return value
    data = copy.copy(data)
    data[way[0]] = changed(data[way[0]], way[1:], value)
    return data


@pytest.mark.parametrize(("name", "file"), [(name, file) for name in NAMES for file in TARGETS[name].files])
def test_unknown_keys_and_values_of_another_type(name, file, scratch):
    data = json.loads((scratch / file).read_text())
    for way, value in places(data):
        if isinstance(value, dict) and (not way or way[-1] not in MAPS) and (len(way) < 2 or way[-2] not in MAPS - {"kinds"}):
            refused(name, scratch, file, changed(data, way, value | {"unheard_of": 1}), "unheard_of")
        if not way:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        for wrong in (
            ("5", True) if number else ({"x": [3]},) if value is None else (3, [[3]] if isinstance(value, dict) else {})
        ):
            refused(name, scratch, file, changed(data, way, wrong))
