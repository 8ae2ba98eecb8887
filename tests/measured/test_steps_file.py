"""Steps files: what was written is read, what is damaged is refused, what grows is renamed."""

import json

import pytest

from rlplace.errors import InputError
from rlplace.measured.steps_file import MAX_LINE_BYTES, StepHeader, StepLine, StepsReader, StepsWriter

HEADER = StepHeader("plan", "problem", 0.5)


def line(step, seconds=0.1, **more):
    return json.dumps({"step": step, "s": seconds, "at": 1.5, **more})


def read(path):
    return list(StepsReader(path).read())


def test_round_trip_and_growth(tmp_path):
    path = tmp_path / "run.steps.jsonl"
    writer = StepsWriter(path, HEADER)
    writer.write([line(0), line(1, busy_s=[0.1, 0.2]), json.dumps({"event": "drift"})])
    reader = StepsReader(path)
    assert list(reader.read()) == [HEADER, StepLine(0, 0.1), StepLine(1, 0.1, (0.1, 0.2))]
    assert list(reader.read()) == []
    with open(path, "a") as stream:
        stream.write(line(2)[:10])
    assert list(reader.read()) == []  # half a line is not yet a line
    with open(path, "a") as stream:
        stream.write(line(2)[10:] + "\n")
    assert list(reader.read()) == [StepLine(2, 0.1)]


def test_half_a_line_of_a_killed_run_is_taken_away(tmp_path):
    path = tmp_path / "run.steps.jsonl"
    StepsWriter(path, HEADER).write([line(0), line(1)])
    with open(path, "a") as stream:
        stream.write('{"step": 2, "s"')
    StepsWriter(path, HEADER).write([line(0)])
    assert read(path) == [HEADER, StepLine(0, 0.1), StepLine(1, 0.1), HEADER, StepLine(0, 0.1)]


def test_a_file_that_has_grown_is_renamed(tmp_path):
    path = tmp_path / "run.steps.jsonl"
    writer = StepsWriter(path, HEADER, max_bytes=2000)
    reader = StepsReader(path)
    seen = []
    for step in range(400):
        writer.write([line(step)], 0.25)
        seen += reader.read()
        assert path.stat().st_size <= 2000
    assert [item.step for item in seen if isinstance(item, StepLine)] == list(range(400))
    headers = [item for item in seen if isinstance(item, StepHeader)]
    assert headers[0] == HEADER
    assert set(headers[1:]) == {StepHeader("plan", "problem", 0.5, True, 0.25)}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.steps.jsonl", "run.steps.jsonl.1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{not json}\n", "line 2: not valid JSON"),
        ("[1, 2]\n", "line 2: expected an object"),
        ('{"step": 1}\n', "'s' is missing"),
        ('{"step": 1, "s": 0.1, "x": 2}\n', "unknown key 'x'"),
        ('{"step": -1, "s": 0.1}\n', "whole number"),
        ('{"step": 1.5, "s": 0.1}\n', "whole number"),
        ('{"step": true, "s": 0.1}\n', "whole number"),
        ('{"step": 1, "s": "fast"}\n', "expected a number"),
        ('{"step": 1, "s": -0.1}\n', "negative"),
        ('{"step": 1, "s": NaN}\n', "not valid JSON"),
        ('{"step": 1, "s": 1e999}\n', "not valid JSON"),
        ('{"step": 1, "s": 0.1, "busy_s": 3}\n', "list of seconds"),
        ('{"step": 1, "s": 0.1, "busy_s": [null]}\n', "expected a number"),
        ('{"format": "rlplace.plan", "version": 1}\n', "expected format"),
        ('{"format": "rlplace.steps", "version": 2, "plan": "", "problem": ""}\n', "upgrade rlplace"),
        ('{"format": "rlplace.steps", "version": 1, "plan": 1, "problem": ""}\n', "fingerprints"),
        ('{"format": "rlplace.steps", "version": 1, "plan": "", "problem": "", "reference_s": 0}\n', "positive"),
        ("[" * 5000 + "\n", "not valid JSON"),
        ("1" * (MAX_LINE_BYTES + 5) + "\n", "longer than"),
        ("1" * (2 * MAX_LINE_BYTES), "longer than"),
        ("\xff\n", "not valid JSON"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, text, reason):
    path = tmp_path / "run.steps.jsonl"
    StepsWriter(path, HEADER)
    with open(path, "ab") as stream:
        stream.write(text.encode("latin-1"))
    with pytest.raises(InputError, match=reason) as found:
        read(path)
    assert "\n" not in str(found.value) and len(str(found.value)) < 400
    assert str(path) in str(found.value)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    with pytest.raises(InputError, match="cannot be read"):
        read(path)
    path.write_text(line(0) + "\n")
    with pytest.raises(InputError, match="header of a steps file is missing"):
        read(path)
