"""Records of files: what msgspec refuses is told by path, what was expected and what was found."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.records import Count, Number, Record, Text, Whole, build, check_record, plain


class Pair(Record, array_like=True):
    """Two numbers that stand as a list."""

    first: Whole
    second: Number


class Item(Record):
    """An entry of a file."""

    name: Text
    size_bytes: Whole = 0
    phase: Literal["forward", "backward"] = "forward"
    pairs: tuple[Pair, ...] = ()
    times: float | list[float | None] = 0.0
    dims: Mapping[str, Count] = {}
    by_op: Mapping[Annotated[int, msgspec.Meta(ge=0)], tuple[str, ...]] = {}


class File(Record):
    """A file of entries."""

    items: tuple[Item, ...]
    note: str | None = None

    def __post_init__(self):
        if len({item.name for item in self.items}) < len(self.items):
            raise InputError("a name appears twice")


def one(**fields):
    return {"items": [{"name": "a"}, {"name": "b", **fields}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "file: expected an object, found []"),
        ({}, "file: key 'items' is missing"),
        ({"items": 3}, "file: items: expected a list, found 3"),
        ({"items": [], "itms": 1}, "file: unknown key 'itms'; did you mean 'items'?"),
        ({"items": [], "x` - at `$.items[0]": 1}, "file: unknown key 'x` - at `$.items[0]'; known: items, note"),
        ({"items": [3]}, "file: items[0]: expected an object, found 3"),
        ({"items": [{"name": "a"}] * 2}, "file: a name appears twice"),
        ({"items": [], "note": 3}, "file: note: expected text or null, found 3"),
        ({"items": [{}]}, "file: items[0]: key 'name' is missing"),
        (one(nam="x"), "file: items[1]: unknown key 'nam'; did you mean 'name'?"),
        (one(name=""), "file: items[1].name: expected text that is not empty, found ''"),
        (one(size_bytes=True), "file: items[1].size_bytes: expected a whole number from 0 up, found True"),
        (one(size_bytes=-1), "file: items[1].size_bytes: expected a whole number from 0 up, found -1"),
        (one(size_bytes=1.5), "file: items[1].size_bytes: expected a whole number from 0 up, found 1.5"),
        (one(phase="forwrd"), "file: items[1].phase: unknown phase 'forwrd'; did you mean 'forward'?"),
        (one(phase="\ud800"), r"file: a text holds '\ud800', which is no character"),
        (one(phase=["x"]), "file: items[1].phase: expected one of backward, forward, found ['x']"),
        (one(pairs=[[1, 2], [1]]), "file: items[1].pairs[1]: expected a list of 2 values: first, second, found [1]"),
        (one(pairs=[[1, float("nan")]]), "file: items[1].pairs[0][1]: expected a finite number, found nan"),
        (one(pairs=[[1, "2"]]), "file: items[1].pairs[0][1]: expected a finite number, found '2'"),
        (one(pairs=[[1, 10**400]]), "file: items[1].pairs[0][1]: the number is too large"),
        (one(times="x"), "file: items[1].times: expected a number or a list, found 'x'"),
        (one(times=[1, None, "x"]), "file: items[1].times[2]: expected a number or null, found 'x'"),
        (one(dims={"m": 1, "n": 0}), "file: items[1].dims['n']: expected a whole number from 1 up, found 0"),
        (one(by_op={"1": ["a"], "2": [3]}), "file: items[1].by_op['2'][0]: expected text, found 3"),
        (one(by_op={"one": []}), "file: items[1].by_op: 'one' is not a key that can stand here"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(data, message):
    with pytest.raises(InputError) as caught:
        build(File, data, "file")
    assert str(caught.value) == message


def test_records_come_back_from_their_data_with_defaults_left_out():
    item = Item("a", pairs=(Pair(1, 2.0),), times=[1.0, None], dims={"m": 3}, by_op={4: ("x",)})
    data = plain(File((item, Item("b", times=float("0")))))
    assert data == {
        "items": [
            {"name": "a", "pairs": [[1, 2.0]], "times": [1.0, None], "dims": {"m": 3}, "by_op": {"4": ["x"]}},
            {"name": "b"},
        ]
    }
    assert build(File, data, "file").items[0] == item


def test_whole_numbers_may_be_written_as_floats_only_where_asked_for():
    data = {"items": [{"name": "a", "size_bytes": 80e9}]}
    assert build(File, data, "file", whole_floats=True).items[0].size_bytes == 80_000_000_000
    with pytest.raises(InputError, match=r"found 80000000000\.0"):
        build(File, data, "file")
    data["items"][0]["size_bytes"] = 1.5
    with pytest.raises(InputError, match=r"found 1\.5"):
        build(File, data, "file", whole_floats=True)


def test_a_record_made_in_python_is_checked_like_a_file():
    check_record(Item("a", size_bytes=np.int64(3)), "item")
    with pytest.raises(InputError, match="item: size_bytes: expected a whole number from 0 up, found -3"):
        check_record(Item("a", size_bytes=np.int64(-3)), "item")
