"""Hypothesis strategies of damaged files: bytes of any kind, and JSON, TOML and safetensors by what they mean."""

from __future__ import annotations

import copy
import json
import struct
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

BYTES, JSON, LINES, TOML, TENSORS, TEXT = "bytes", "json", "lines", "toml", "safetensors", "text"

_HERE = "@here@"
"""Marks the place of a text in JSON, or of a key."""

_NUMBERS = st.sampled_from((0, 1, -1, 0.5, 1e308, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**30)) | st.integers() | st.floats(
    allow_nan=False, allow_infinity=False
)  # fmt: skip
_TEXTS = st.sampled_from(
    ("", "x", "nan", "forward", "\ud800", "\0", "\n", "\x1b[31m", "é" * 90, "a" * 5000, "../../x", "/dev/zero", "os:system",
     "F64", "BOOL", "1")
) | st.text(max_size=20)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
).map(json.dumps) | st.sampled_from(
    ("NaN", "Infinity", "-Infinity", "1e400", "1" * 5000, "0." + "1" * 3000, "[" * 400 + "]" * 400, "[" * 30_000 + "]" * 30_000,
     '{"a":' * 990 + "1" + "}" * 990, '{"a":1,"a":2}', "01", "+1", "'x'", '"\\ud800"', "", "[" + "0," * 20_000 + "0]",
     '"' + "y" * 100_000 + '"', "[4611686018427387904, 4]", "[[0, 0], [0, 0]]", "[null]")
)  # fmt: skip
"""Texts of JSON values, and texts that are none."""

_PIECES = st.binary(max_size=40) | st.sampled_from(
    (b"\xef\xbb\xbf", b"\r\n", b'"', b"{", b"]", b",", b"9" * 30, b"1e999", b"NaN", b"\\ud800", b"\xed\xa0\x80", b"'''", b"../",
     b"\x80\x04", b"(" * 40, b"PK\x03\x04", b"# " * 200)
)  # fmt: skip
_WORDS = st.sampled_from(
    (":", ",", "=", "+", "x", "host", "cpu", "-1", "nan", "1e9", "ib=", "8x", "../", "\0", "é", "hf:", "h100")
)
_OTHERS = st.sampled_from((
    b"", b" ", b"\0", b"null", b"[]", b"{}", b'""', b"[" * 100_000, b'{"a":' * 50_000, b"a = 1\n", "{}".encode("utf-16"),
    b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
    b"PK\x03\x04" + bytes(60), b"SQLite format 3\0" + bytes(200), b"\x1f\x8b\x08" + bytes(40),
    b'{"format": "rlplace.problem", "version": 1}',
))  # fmt: skip
"""Files of other kinds under the same name."""


def places(data: Any) -> list[tuple[Any, Any]]:
    """Lists every (container, key) of nested data."""
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        holder = waiting.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        found += [(holder, key) for key, _ in items]
        waiting += [value for _, value in items]
    return found


def _near(value: Any) -> st.SearchStrategy[str]:
    """Draws texts of values that differ little from one."""
    if isinstance(value, bool) or value is None:
        near = [not value, 0, 1, "x"]
    elif isinstance(value, dict):
        near = [str(value), [value], {"x": value}, {}]
    elif isinstance(value, (int, float)):
        near = [
            value + 1,
            value - 1,
            -value,
            value * 2,
            value * 1e9,
            value + 0.5,
            float(value),
            str(value),
            [value],
            0,
            1 << 40,
        ]
    else:
        near = [str(value), [value], {"x": value}, value * 0, value * 2, value[:1000] * 50]
    return st.sampled_from([json.dumps(one) for one in near])


@st.composite
def edited(draw: st.DrawFn, data: Any, render: Callable[[Any], str] = json.dumps) -> bytes:
    """Draws a text of nested data with some entries left out, renamed, doubled, exchanged or replaced by other values."""
    data, texts = copy.deepcopy(data), []
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        if not (found := places(data)):
            break
        (holder, at), (other, there) = (found[draw(st.integers(0, len(found) - 1))] for _ in range(2))
        what = draw(st.sampled_from(("value", "value", "near", "near", "out", "copy", "again", "name")))
        if what == "out":
            del holder[at]
        elif what == "copy":
            holder[at] = copy.deepcopy(other[there])
        elif what == "again" and isinstance(holder, list):
            holder.insert(at, copy.deepcopy(holder[at]))
        elif what in ("again", "name") and isinstance(holder, dict):
            value = holder[at] if what == "again" else holder.pop(at)
            holder[draw(_TEXTS)] = copy.deepcopy(value)
        else:
            texts.append(draw(_near(holder[at]) if what == "near" and holder[at] != _HERE else VALUES))
            holder[at] = _HERE
    whole = render(data)
    for text in texts:
        whole = whole.replace(json.dumps(_HERE), text, 1)
    return whole.encode("utf-8", "surrogatepass")


@st.composite
def _lines(draw: st.DrawFn, data: bytes) -> bytes:
    """Draws JSON lines of which one is changed, doubled or left out."""
    lines = data.splitlines(keepends=True)
    at, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    what = draw(st.sampled_from(("edit", "edit", "edit", "out", "again", "order")))
    if what == "edit":
        lines[at] = draw(edited(json.loads(lines[at]))) + b"\n"
    elif what == "order":
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at : at + 1] = [] if what == "out" else [lines[at], lines[other]]
    return b"".join(lines)


def toml(value: Any) -> str:
    """Writes a value of TOML with inline tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value).replace("Infinity", "inf")


def _tables(data: Any) -> str:
    return "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in data.items())


def pack(header: bytes, body: bytes) -> bytes:
    """Makes a safetensors file of header and body."""
    return struct.pack("<Q", len(header)) + header + body


@st.composite
def _tensors(draw: st.DrawFn, data: bytes) -> bytes:
    """Draws a safetensors file whose header lies, whose body is short, or whose values are no weights."""
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    what = draw(st.sampled_from(("header", "header", "header", "length", "short", "values")))
    if what == "header":
        return pack(draw(edited(json.loads(header))), body)
    if what == "length":
        claimed = draw(st.sampled_from((0, 1, length + 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)) | st.integers(0, 1 << 24))
        return struct.pack("<Q", claimed) + header + body
    if what == "short":
        return data[: draw(st.integers(8 + length, len(data)))]
    at = 4 * draw(st.integers(0, len(body) // 4 - 1))
    value = draw(st.sampled_from((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\xff\xff\x7f\x7f")))
    return pack(header, body[:at] + value + body[at + 4 :])


@st.composite
def _spliced(draw: st.DrawFn, data: bytes, pieces: st.SearchStrategy[bytes] = _PIECES) -> bytes:
    """Draws bytes of which a part is left out, replaced or doubled, or that end early."""
    at = draw(st.integers(0, len(data)))
    to = min(len(data), at + draw(st.sampled_from((0, 0, 1, 3, 40, len(data)))))
    return data[:at] + draw(pieces | st.just(data[at:to] * 2)) + data[to:]


def damaged(kind: str, data: bytes) -> st.SearchStrategy[bytes]:
    """Draws damaged copies of a file of one of the kinds, and now and then something unlike it."""
    by_kind: dict[str, Callable[[], st.SearchStrategy[bytes]]] = {
        BYTES: lambda: _spliced(data),
        JSON: lambda: edited(json.loads(data)),
        LINES: lambda: _lines(data),
        TOML: lambda: edited(tomllib.loads(data.decode()), _tables),
        TENSORS: lambda: _tensors(data),
        TEXT: lambda: _spliced(data, st.tuples(_WORDS, st.sampled_from((1, 2, 500))).map(lambda p: (p[0] * p[1]).encode())),
    }
    own = by_kind[kind]()
    return st.one_of(own, own, own, own, _spliced(data), _OTHERS)
