"""Typed records of files: from parsed JSON or TOML to records and back, every type, key and range checked by msgspec.

A record is a frozen `Record`; its annotations, with the constrained types below, are the format. `build` reads one and `plain`
writes it, defaults left out. Errors name the field by its path, what it must be, and what was found there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, overload

import msgspec
import msgspec.inspect
from msgspec import NODEFAULT, Meta

from rlplace.errors import InputError, show, unknown_name

Kind = TypeVar("Kind")

_MOST_INT = (1 << 62) - 1
_MOST_FLOAT = 1.7976931348623157e308

Whole = Annotated[int, Meta(ge=0, le=_MOST_INT)]
"""A whole number from 0 up."""

Count = Annotated[int, Meta(ge=1, le=_MOST_INT)]
"""A whole number from 1 up."""

Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
"""A size in memory."""

Number = Annotated[float, Meta(ge=-_MOST_FLOAT, le=_MOST_FLOAT)]
"""A finite number."""

Text = Annotated[str, Meta(min_length=1)]
"""Text that is not empty."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of records of files; a subclass lists its fields like a dataclass.

    Attributes:
        written: Fields that `plain` writes even where they have their default.
    """

    written: ClassVar[tuple[str, ...]] = ()


@overload
def build(kind: type[Kind], data: Any, where: str, *, whole_floats: bool = False) -> Kind: ...
@overload
def build(kind: Any, data: Any, where: str, *, whole_floats: bool = False) -> Any: ...
def build(kind: Any, data: Any, where: str, *, whole_floats: bool = False) -> Any:
    """Builds a record, or any type that msgspec knows, from parsed JSON or TOML.

    Args:
        kind: Type to build.
        data: Plain data; truth values are not numbers, whole numbers are valid where floats are expected.
        where: Start of the message.
        whole_floats: Accept floats without a fraction (``80e9``) for whole numbers.

    Raises:
        InputError: Names the first field that is wrong.
    """
    try:
        return msgspec.convert(data, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        if whole_floats and "`int" in str(error) and "got `float`" in str(error):
            return build(kind, _without_floats(data), where)
        raise _explained(str(error), kind, data, where) from None
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: a text holds {show(error.object[error.start])}, which is no character") from None


def plain(value: Any) -> Any:
    """Returns a record, or anything that holds records, as plain data for JSON or TOML: values that equal their defaults left
    out.

    Raises:
        InputError: The data is nested too deeply to be written.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise InputError(f"{type(value).__name__}: nested too deeply to be written") from None


_SIMPLE = {int, float, str, bool, type(None)}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        items = ((name, getattr(value, attribute), default) for name, attribute, default in _fields(type(value)))
        if value.__struct_config__.array_like:
            return [_plain(item) for _, item, _ in items]
        return {name: _plain(item) for name, item, default in items if item is not default and item != default}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value) if set(map(type, value)) <= _SIMPLE else [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value  # numpy's numbers and arrays


_fields_of = cache(msgspec.structs.fields)  # which reads annotations anew each time


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Returns key, attribute and default of each field of a record."""
    written = getattr(kind, "written", ())
    return tuple(
        (
            f.encode_name,
            f.name,
            NODEFAULT if f.name in written else f.default if f.default_factory is NODEFAULT else f.default_factory(),
        )
        for f in _fields_of(kind)
    )


_TRUSTED = ContextVar("trusted", default=False)


@contextmanager
def trusted() -> Iterator[None]:
    """Leaves out checks of fields inside: for records by the thousand that are derived from checked ones."""
    token = _TRUSTED.set(True)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def is_trusted() -> bool:
    """Returns whether `trusted` leaves checks out."""
    return _TRUSTED.get()


def check_record(record: Record, where: str) -> None:
    """Checks a record built in Python as if it came from a file; for its ``__post_init__``.

    Raises:
        InputError: Names the first field that is wrong.
    """
    if is_trusted():
        return
    for field in _fields_of(type(record)):
        check(field.type, getattr(record, field.name), f"{where}: {field.encode_name}")


def check(kind: Any, value: Any, where: str) -> None:
    """Checks a value built in Python as if it came from a file; see `build`."""
    build(kind, plain(value), where)


def _without_floats(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_floats(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_floats(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


def _explained(text: str, kind: Any, data: Any, where: str) -> InputError:
    """Returns the error for data that msgspec refused: the path is from its text, the rest from types and data."""
    match = re.search(r" - at `(key` in `)?\$([^`]*)`$", text)
    steps = re.findall(r"\.\w+|\[[^\]]*\]", match[2]) if match else []
    field = _Field(kind, data, where).at(steps)
    if text.startswith("Object contains unknown field"):
        at = field if field is not None and field.unknown_keys() else _Field(kind, data, where)  # a key may look like a path
        return InputError(f"{at.path}: {unknown_name('key', at.unknown_keys()[0], at.fields())}")
    if field is None:
        return InputError(f"{where}: {text}")
    if match is not None and match[1]:
        key = field.bad_key()
        if key.literals() and isinstance(key.data, str):
            return InputError(f"{field.path}: {unknown_name('key', key.data, key.literals())}")
        return InputError(f"{field.path}: {show(key.data)} is not a key that can stand here")
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        return InputError(f"{field.path}: key {missing[1]!r} is missing")
    if text.startswith("Number out of range"):
        return InputError(f"{field.path}: the number is too large")
    if not text.startswith(("Expected", "Invalid")):  # raised by the record itself
        return InputError(f"{field.path}: {text[: match.start()] if match else text}")
    if field.literals() and isinstance(field.data, str):
        what = re.sub(r"\[[^\]]*\]", "", field.path).rpartition(".")[2].rpartition(": ")[2]
        return InputError(f"{field.path}: {unknown_name(what, field.data, field.literals())}")
    return InputError(f"{field.path}: expected {_wanted(msgspec.inspect.type_info(field.kind))}, found {show(field.data)}")


class _Field:
    """A field of parsed data, with the type that it must have.

    Attributes:
        kind: The type.
        data: The value of the field.
        where: Start of the message.
        name: Path inside it.
    """

    def __init__(self, kind: Any, data: Any, where: str, name: str = "") -> None:
        self.kind, self.data, self.where, self.name = kind, data, where, name

    @property
    def path(self) -> str:
        """The path of the field, for messages."""
        return f"{self.where}: {self.name[1:]}" if self.name.startswith(".") else f"{self.where}{self.name}"

    def at(self, steps: list[str]) -> _Field | None:
        """Returns the field at a path; None where there is none."""
        field: _Field | None = self
        for step in steps:
            field = None if field is None else field._inside(step)
        return field

    def _bare(self) -> Any:
        """Returns the type without constraints; among alternatives the one that matches the data."""
        kind = get_args(self.kind)[0] if get_origin(self.kind) is Annotated else self.kind
        if get_origin(kind) not in (Union, UnionType):
            return kind
        members = [_Field(member, self.data, self.where)._bare() for member in get_args(kind) if member is not NoneType]
        for member in members:
            config = getattr(member, "__struct_config__", None)
            is_list = get_origin(member) in (list, tuple) or (config is not None and config.array_like)
            if isinstance(self.data, (list, tuple)) == is_list:
                return member
        return members[0]

    def fields(self) -> dict[str, Any]:
        """Returns types of a record's keys; empty for anything else."""
        kind = self._bare()
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return {}
        return {field.encode_name: field.type for field in _fields_of(kind)}

    def unknown_keys(self) -> list[Any]:
        """Keys of the data that the record does not have."""
        return [key for key in self.data if key not in self.fields()] if isinstance(self.data, Mapping) else []

    def literals(self) -> list[str]:
        """Returns texts that the type allows, where it allows no others."""
        kind = get_args(self.kind)[0] if get_origin(self.kind) is Annotated else self.kind
        members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        names = [name for member in members if get_origin(member) is Literal for name in get_args(member)]
        return [name for name in names if isinstance(name, str)]

    def _inside(self, step: str) -> _Field | None:
        """Returns the field one step further: ``.name``, ``[number]`` or ``[...]`` for the first wrong value of a mapping."""
        kind, fields = self._bare(), self.fields()
        try:
            if step == "[...]":
                item = get_args(kind)[1]
                key = next(key for key, value in self.data.items() if not _fits(item, value))
                return _Field(item, self.data[key], self.where, f"{self.name}[{show(key)}]")
            if step.startswith("."):
                return _Field(fields[step[1:]], self.data[step[1:]], self.where, self.name + step)
            items = list(fields.values()) or list(get_args(kind))
            fixed = fields or (get_origin(kind) is tuple and items[-1] is not Ellipsis)
            index = int(step[1:-1])
            return _Field(items[index] if fixed else items[0], self.data[index], self.where, self.name + step)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration):
            return None

    def bad_key(self) -> _Field:
        """Returns the first key of a mapping that is not of the type of its keys."""
        kind: Any = get_args(self._bare())[0]
        wrong = (key for key in self.data if not _fits(GenericAlias(dict, (kind, Any)), {key: None}))
        return _Field(kind, next(wrong, None), self.where)


def _fits(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind, strict=True, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return False
    return True


_PLAIN = {
    msgspec.inspect.NoneType: "null",
    msgspec.inspect.BoolType: "true or false",
    msgspec.inspect.StructType: "an object",
}


def _wanted(info: Any) -> str:
    """Returns the values that a type allows, in words."""
    if isinstance(info, msgspec.inspect.Metadata):
        return _wanted(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        return " or ".join(_wanted(item) for item in info.types)
    if isinstance(info, msgspec.inspect.IntType):
        return "a whole number" + _range(info, _MOST_INT)
    if isinstance(info, msgspec.inspect.FloatType):
        return ("a finite number" if info.le == _MOST_FLOAT == -(info.ge or 0) else "a number") + _range(info, _MOST_FLOAT)
    if isinstance(info, msgspec.inspect.LiteralType):
        return "one of " + ", ".join(map(str, info.values))
    if isinstance(info, msgspec.inspect.StrType):
        if info.pattern:
            return f"text of the form {info.pattern}"
        length = "" if info.max_length is None else f" of at most {info.max_length} characters"
        return f"text{length}" if not info.min_length else f"text{length} that is not empty"
    if isinstance(info, msgspec.inspect.DictType):
        return "an object" + (f" of {info.min_length} or more entries" if info.min_length else "")
    if isinstance(info, msgspec.inspect.TupleType):
        return f"a list of {len(info.item_types)} values"
    if isinstance(info, msgspec.inspect.StructType) and info.array_like:
        return f"a list of {len(info.fields)} values: {', '.join(field.encode_name for field in info.fields)}"
    if isinstance(info, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)):
        least, most = info.min_length or 0, info.max_length
        return "a list" + (f" of {least} to {most}" if most is not None else f" of {least} or more" if least else "")
    return _PLAIN.get(type(info), "another value")


def _range(info: Any, most: float) -> str:
    above = info.le if info.lt is None else info.lt - isinstance(info.lt, int)
    low, high = info.ge, None if above is None or above >= most else above
    if info.gt is not None:
        return f" above {_short(info.gt)}" + ("" if high is None else f", up to {_short(high)}")
    if low is None or low <= -most:
        return "" if high is None else f" up to {_short(high)}"
    return f" from {_short(low)} up" if high is None else f" in {_short(low)}..{_short(high)}"


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
