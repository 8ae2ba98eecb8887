"""Files and their records: what is refused is told by path, what was expected and what was found; numbers as text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import pytest

from rlplace.agents.checkpoint import read_tensors
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import MAX_FILE_BYTES, read_json, read_text, write_json
from rlplace.plan import PlacementPlan
from rlplace.plan.plan import make_plan
from rlplace.problem.generate import random_problem
from rlplace.records import Count, Number, Record, Text, Whole, build, check_record, plain, trusted
from rlplace.text import bytes_text, gb, ms, percent, seconds_text, table


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


def test_trusted_records_are_not_checked_and_others_are_again() -> None:
    wrong = Item("a", size_bytes=-3)
    with trusted():
        check_record(wrong, "item")
    with pytest.raises(InputError, match="item"):
        check_record(wrong, "item")
    with pytest.raises(KeyError), trusted():
        raise KeyError
    with pytest.raises(InputError, match="item"):
        check_record(wrong, "item")


def test_units_that_fit():
    assert [seconds_text(v) for v in (None, 0.0, 3.2e-10, 1.5e-6, 0.0177, 12.3456, 4321.9)] == [
        "-", "0 s", "0.32 ns", "1.5 µs", "17.7 ms", "12.35 s", "4322 s",
    ]  # fmt: skip
    assert [bytes_text(v) for v in (0, 999, 1e3, 12.34e6, 8.6e10, 744e9, 999.7e9, 1.5e12, -2e6)] == [
        "0 bytes", "999 bytes", "1 kB", "12.3 MB", "86 GB", "744 GB", "1000 GB", "1.5 TB", "-2 MB",
    ]  # fmt: skip


def test_cells():
    assert [ms(None), ms(0.0012345), ms(0.001, sign=True)] == ["-", "1.234", "+1.000"]
    assert [gb(None), gb(2.5e9)] == ["-", "2.500"]
    assert [percent(None), percent(0.5), percent(-0.25, sign=True)] == ["-", "50.0 %", "-25.0 %"]


def test_tables_are_aligned():
    assert table(["name", "<what", "n"], [["a", "long one", "1"], ["bbbbb", "x", "200"]]) == [
        "name   what        n",
        "a      long one    1",
        "bbbbb  x         200",
    ]
    assert table(["only", "header"], []) == ["only  header"]


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as stream:
        stream.truncate(2 * MAX_FILE_BYTES)
    with pytest.raises(InputError, match="the limit is"):
        read_text(path)
    with pytest.raises(InputError, match="the limit is"):
        read_tensors(path)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/", "nowhere.json", "a\0b", ""])
def test_what_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(InputError) as raised:
        read_json(path, "rlplace.plan", 1)
    assert "\n" not in str(raised.value) and "\0" not in str(raised.value)


@pytest.mark.parametrize("depth", [50, 500, 900, 5000, 200_000])
def test_deep_nesting_is_refused_or_survives_the_way_back(tmp_path: Path, depth: int) -> None:
    problem = random_problem(0, num_groups=3, num_devices=1)
    plan = make_plan(problem, [0, 0, 0], planner="single").to_dict()
    text = json.dumps(plan | {"source": {"x": "<deep>"}}).replace('"<deep>"', "[" * depth + "]" * depth)
    path = tmp_path / "p.plan.json"
    path.write_text(text)
    try:
        plan_again = PlacementPlan.load(path)
        plan_again.save(tmp_path / "again.plan.json")
    except InputError as error:
        assert "nested too deeply" in str(error) and depth > 50
    assert sorted(os.listdir(tmp_path)) in (["p.plan.json"], ["again.plan.json", "p.plan.json"])


@pytest.mark.parametrize("data", [{"x": float("nan")}, {"x": object()}])
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, data: dict[str, object]) -> None:
    with pytest.raises((InputError, TypeError, ValueError)):
        write_json(tmp_path / "x.json", data)
    assert not os.listdir(tmp_path)


def test_values_in_messages_are_short() -> None:
    assert show("5") == "'5'" and show(5) == "5"
    for value in (10**5000, [10**5000], ["x" * 10**6] * 100, "x\ny" * 1000):
        assert len(show(value)) <= 80 and "\n" not in show(value)
    for name in (None, 5, [], "x" * 10**6, 10**5000, {}):
        assert len(str(unknown_name("planner", name, ["best", "agent"]))) < 150


def test_a_plan_takes_lists() -> None:
    problem = random_problem(0, num_groups=3, num_devices=2)
    plan = make_plan(problem, [0, 1, 0], planner="mine", priority=list(range(problem.num_ops)))
    assert isinstance(plan.priority, np.ndarray)
    with pytest.raises(InputError, match="priority"):
        make_plan(problem, [0, 1, 0], planner="mine", priority=[0])
