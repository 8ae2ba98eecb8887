"""Damages files: bytes of any kind, and JSON, TOML and safetensors by what they mean. Everything follows from the seed."""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

BYTES, JSON, LINES, TOML, TENSORS, TEXT = "bytes", "json", "lines", "toml", "safetensors", "text"

_RAW = "\0raw:"
"""Marks text that goes into JSON as it stands."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e-320, 1e18, 1e308, 1 << 31, (1 << 31) - 1, 1 << 53, 1 << 62, 1 << 63,
    -(1 << 63), 1 << 64, 10**30, "", " ", "x", "0", "1", "nan", "forward", "\ud800", "\u0000", "\n", "\x1b[31m", "\u202e",
    "é" * 90,
    "a" * 300, "../../x", "/dev/zero", "os:system", [], {}, [[]], [0], [[0]], [0, 1], [1, 0], [[0, 0], [0, 0]], [None], [True],
    ["x"], [1.5], [[0, 1], [2]], {"name": "x"}, {"": None}, {"x": {"x": {"x": []}}}, {"bytes": 0, "consumers": []},
    _RAW + "NaN", _RAW + "Infinity", _RAW + "-Infinity", _RAW + "1e400", _RAW + "-1e400", _RAW + "1" * 5000,
    _RAW + "1" + "0" * 400,
    _RAW + "0." + "1" * 3000, _RAW + "[" * 400 + "]" * 400, _RAW + "[" * 30_000 + "]" * 30_000,
    _RAW + '{"a":' * 990 + "1" + "}" * 990,
    _RAW + '{"a":1,"a":2}', _RAW + "01", _RAW + "+1", _RAW + "'x'", _RAW + "0x10", _RAW + '"\\ud800\\ud800"', _RAW + "",
    _RAW + "[" + "0," * 20_000 + "0]", _RAW + '"' + "y" * 100_000 + '"',
)  # fmt: skip
_KEYS = ("x", "name", "nam", "", "format", "version", "__class__", "ops", "\ud800", "z" * 200)
_PATTERNS = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r\n", b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"9" * 30,
    b"1e999", b"NaN",
    b"\\ud800", b"\xed\xa0\x80", b"\xc0\x80", b"null", b"\\", b"=", b"#", b"'''", b"../", b"\x80\x04", b"(" * 40, b"PK\x03\x04",
)  # fmt: skip


def mutate(kind: str, data: bytes, rng: Random) -> bytes:
    """A damaged copy of a file of one of the kinds; sometimes the file itself, or nothing like it."""
    for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 3))):
        damage = _BY_KIND.get(kind)
        if damage is None or rng.random() < 0.15:
            data = _bytes(data, rng)
        else:
            try:
                data = damage(data, rng)
            except (RecursionError, ValueError, OverflowError):  # earlier damage is too much for this kind
                data = _bytes(data, rng)
    return data


def _bytes(data: bytes, rng: Random) -> bytes:
    """Damage that knows nothing of the format."""
    action = rng.randrange(12)
    at, to = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    short = min(to, at + rng.randint(1, 40))
    if action == 0:
        return data[:at]
    if action == 1:
        return data[:at] + data[short:]
    if action == 2:
        return data[:short] + data[at:short] * rng.randint(1, 3) + data[short:]
    if action == 3:
        return data[:at] + rng.choice(_PATTERNS) + data[at:]
    if action == 4:
        return data[:at] + rng.choice(_PATTERNS) + data[short:]
    if action == 5:
        return data[:at] + rng.randbytes(rng.randint(1, 32)) + data[short:]
    if action == 6:
        return data + rng.choice(_PATTERNS) * rng.randint(1, 200)
    if action == 7:
        return data[:at] + bytes(short - at) + data[short:]
    if action == 8:
        return _other(data, rng)
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6) if data else 0):
        where = rng.randrange(len(changed))
        changed[where] = changed[where] ^ (1 << rng.randrange(8)) if action < 11 else rng.randrange(256)
    return bytes(changed)


def _other(data: bytes, rng: Random) -> bytes:
    """A file of another kind under the same name."""
    text = data.decode("utf-8", "replace")
    return rng.choice((
        b"", b" ", b"\0", b"null", b"[]", b"{}", b"0", b'""', b"\xef\xbb\xbf" + data, text.encode("utf-16"),
        text.encode("utf-32-be"), text.encode("utf-7"), data[::-1], data * 2, bytes(len(data)), rng.randbytes(200),
        b"[" * 100_000, b'{"a":' * 50_000,
        b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
        b"PK\x03\x04" + rng.randbytes(60), b"SQLite format 3\0" + rng.randbytes(200), b"\x1f\x8b\x08" + rng.randbytes(40),
        b"a = 1\n",
        b'{"format": "rlplace.problem", "version": 1}', data.replace(b" ", b"\n"), data.replace(b"1", b"-1"),
    ))  # fmt: skip


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested data."""
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        holder = waiting.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, value in items:
            found.append((holder, key))
            waiting.append(value)
    return found


def _edit(data: Any, rng: Random) -> Any:
    """Changes one entry of nested data in place."""
    paths = places(data)
    if not paths:
        return copy.deepcopy(rng.choice(VALUES))
    (holder, at), (other, there) = rng.choice(paths), rng.choice(paths)
    action = rng.choice((0, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 8))
    if action == 0:
        del holder[at]
    elif action == 1:
        holder[at] = copy.deepcopy(other[there])
    elif action == 2 and isinstance(holder, list):
        holder.insert(at, copy.deepcopy(holder[at]))
    elif action == 2:
        holder[_RAW + str(at)] = copy.deepcopy(holder[at])  # the same key again
    elif action == 3 and isinstance(holder, dict):
        holder[rng.choice(_KEYS)] = copy.deepcopy(rng.choice(VALUES))
    elif action == 4 and isinstance(holder, dict):
        holder[rng.choice(_KEYS)] = holder.pop(at)
    elif action == 5 and isinstance(holder[at], (int, float)) and not isinstance(holder[at], bool):
        holder[at] = _number(holder[at], rng)
    elif action == 6 and isinstance(holder[at], list) and len(holder[at]) < 1000:
        holder[at] = holder[at] * rng.choice((0, 2, 3, 50))
    elif action == 7 and isinstance(holder[at], (dict, list, str)):
        holder[at] = rng.choice((str, lambda v: [v], lambda v: {"x": v}))(holder[at])
    else:
        holder[at] = copy.deepcopy(rng.choice(VALUES))
    return data


def _number(value: float, rng: Random) -> Any:
    """A number near the one that was there, or far from it."""
    return rng.choice((
        value + 1, value - 1, -value, value * 2, value * 1e9, value / 1e9 if value else 1e-9, float(value), str(value), [value],
        value + 0.5, 0, bool(value), 4096, 1 << 20, 1 << 40, 1 << 60,
    ))  # fmt: skip


def _json(data: bytes, rng: Random) -> bytes:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, rng)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        parsed = _edit(parsed, rng)
    return json_bytes(parsed)


def _lines(data: bytes, rng: Random) -> bytes:
    """JSON lines: one of them changed, or their order."""
    lines = data.splitlines(keepends=True) or [b""]
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    action = rng.randrange(6)
    if action == 0:
        del lines[at]
    elif action == 1:
        lines.insert(at, lines[other])
    elif action == 2:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = _json(lines[at], rng) + b"\n"
    return b"".join(lines)


def json_bytes(data: Any) -> bytes:
    """JSON text, also of what marks itself as text to stand as it is."""
    return _text(data).encode("utf-8", "surrogatepass")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.removeprefix(_RAW) if value.startswith(_RAW) else json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k).removeprefix(_RAW))}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return json.dumps(value)


def _toml(data: bytes, rng: Random) -> bytes:
    import tomllib

    try:
        parsed = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        return _bytes(data, rng)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        parsed = _edit(parsed, rng)
    if not isinstance(parsed, dict):
        return _bytes(data, rng)
    lines = [f"{json.dumps(str(key).removeprefix(_RAW))} = {_toml_text(value)}" for key, value in parsed.items()]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _toml_text(value: Any) -> str:
    """TOML with inline tables; what TOML lacks becomes text."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k).removeprefix(_RAW))} = {_toml_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_text, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if isinstance(value, str):
        raw = value.removeprefix(_RAW).replace("Infinity", "inf").replace("NaN", "nan")
        return raw if value.startswith(_RAW) else json.dumps(value).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, (int, float)) else '"null"'


def _tensors(data: bytes, rng: Random) -> bytes:
    """A safetensors file whose header lies."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    except (ValueError, struct.error):
        return _bytes(data, rng)
    action = rng.randrange(8)
    names = [name for name in header if name != "__metadata__"]
    if action == 0 or not names:
        return (
            struct.pack("<Q", rng.choice((0, 1, length + 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, rng.getrandbits(24))))
            + data[8:]
        )
    if action == 1:
        return data[: 8 + length] + body[: rng.randint(0, len(body))]
    if action == 2:  # values that are no weights
        at = 4 * rng.randrange(len(body) // 4)
        body = (
            body[:at]
            + rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\xff\xff\x7f\x7f"))
            + body[at + 4 :]
        )
        return data[: 8 + length] + body
    entry = header[rng.choice(names)]
    if action == 3 and isinstance(entry, dict):
        entry["data_offsets"] = rng.choice(
            ([0, 0], [0, 1 << 40], [-4, 4], [8, 4], [0, len(body)], [len(body), len(body) + 4], "x", None)
        )
    elif action == 4 and isinstance(entry, dict):
        entry["dtype"] = rng.choice(("F64", "F16", "BF16", "I64", "I8", "BOOL", "U8", "F8_E4M3", "C64", "X", "", None, 5))
    elif action == 5 and isinstance(entry, dict):
        shape = entry.get("shape")
        entry["shape"] = rng.choice(
            ([], [0], [1 << 62, 4], [1 << 32, 1 << 32], [-1], shape[::-1] if isinstance(shape, list) else 0, [[1]], "x")
        )
    elif action == 6:
        name = rng.choice(names)
        header[rng.choice((name + "x", "", "__metadata__", "progress", "0.step", "99999999999999999999.x", "weight.x"))] = (
            header.pop(name)
        )
    else:
        header = _edit(header, rng)
    return pack(json_bytes(header), body)


def pack(header: bytes, body: bytes) -> bytes:
    """A safetensors file of header and body."""
    return struct.pack("<Q", len(header)) + header + body


def _words(data: bytes, rng: Random) -> bytes:
    """Texts of the command line."""
    parts = [
        ":",
        ",",
        "=",
        "+",
        "x",
        "host",
        "cpu",
        "999999",
        "-1",
        "nan",
        "1e9",
        "ib=",
        "8x",
        "../",
        "\0",
        "é",
        "hf:",
        "zoo:",
        "mlp",
        "h100",
    ]
    text = data.decode("utf-8", "replace")
    at = rng.randint(0, len(text))
    return (text[:at] + rng.choice(parts) * rng.choice((1, 1, 2, 500)) + text[rng.choice((at, at + 1, at + 3)) :]).encode()


_BY_KIND: dict[str, Callable[[bytes, Random], bytes]] = {
    JSON: _json, LINES: _lines, TOML: _toml, TENSORS: _tensors, TEXT: _words,
}  # fmt: skip
