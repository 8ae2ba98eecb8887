"""The log of runs: what is written is read, what is cut short is known, what is wrong is refused in one line."""

import json

import pytest

from rlplace.errors import InputError
from rlplace.measure.log import FORMAT, Ended, Run, RunLog, read_runs, shared, write_shared

STRATEGY = {
    "batch": 4, "microbatch": [2], "microbatches": [2],
    "stages": [{"blocks": ["secret.0", "secret.1"], "devices": [0], "recompute": {"secret.1": "full"}}],
}  # fmt: skip


def begun(**options):
    fields = {
        "question": "q", "site": "lab", "strategy": STRATEGY, "kinds": ("t4",), "hosts": (0,), "features": (1.0, 2.0),
        "predicted_s": 1.0, "predicted_share": 0.5, "expected_s": 1.1, "fits": 0.9,
    }  # fmt: skip
    return Run(**fields | options)


def test_a_session_finds_what_another_wrote(tmp_path):
    path = tmp_path / "a.runs.jsonl"
    log = RunLog(path)
    log.end(log.begin(begun()), Ended(status="done", step_s=(1.2, 1.3, 1.1), share=0.6, stack={"torch": "2.13"}))
    log.end(log.begin(begun()), Ended(status="out_of_memory", reason="CUDA out of memory"))
    log.begin(begun())
    again = RunLog(path)
    assert again.runs[:2] == log.runs[:2]
    assert [run.median_s for run in again.runs] == [1.2, None, None]
    assert again.runs[2].status == "crashed" and "ended while it ran" in again.runs[2].reason
    again.end(again.begin(begun(fits=0.1)), Ended(status="done", step_s=(2.0,)))
    assert [run.fits for run in read_runs(path)] == [0.9, 0.9, 0.9, 0.1]


@pytest.mark.parametrize("cut", [1, 2, 20])
@pytest.mark.parametrize("lines", [1, 2, 3])
def test_a_session_goes_on_behind_a_line_that_was_cut_off(tmp_path, lines, cut):
    """With one line it is the header, with two a begin, with three an end; cut by 1 only the end of the line is missing."""
    path = tmp_path / "a.runs.jsonl"
    log = RunLog(path)
    log.end(log.begin(begun()), Ended(status="done", step_s=(1.0,)))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines])[:-cut])
    found = read_runs(path)
    again = RunLog(path)
    again.end(again.begin(begun(fits=0.1)), Ended(status="done", step_s=(2.0,)))
    assert read_runs(path) == [*found, again.runs[-1]] and len(found) == (lines - (cut > 1) >= 2)
    assert path.read_bytes().endswith(b"\n")


def test_a_file_that_was_only_made_gets_its_header(tmp_path):
    path = tmp_path / "a.runs.jsonl"
    path.touch()
    RunLog(path).begin(begun())
    assert len(read_runs(path)) == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"begin": 0, "run": 3}', "run"),
        ('{"begin": 0, "run": {"question": "q"}}', "site"),
        ('{"end": 7, "ended": {"status": "done"}}', "neither"),
        ('{"begin": 1}', "neither"),
        ("[" * 5000, "nested too deeply"),
        ("nonsense", "not valid JSON"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, line, word):
    path = tmp_path / "a.runs.jsonl"
    RunLog(path).begin(begun())
    path.write_text(path.read_text() + line + "\n" + '{"end": 0, "ended": {"status": "crashed"}}\n')
    with pytest.raises(InputError, match=word) as said:
        read_runs(path)
    assert "\n" not in str(said.value) and "line 3" in str(said.value)


@pytest.mark.parametrize("header", ["", "{}", json.dumps({"format": FORMAT, "version": 99}), "[]", "3"])
def test_other_files_are_refused(tmp_path, header):
    path = tmp_path / "a.runs.jsonl"
    path.write_text(header + "\n{}\n")
    with pytest.raises(InputError, match="line 1"):
        read_runs(path)


def test_shared_runs_hold_no_names(tmp_path):
    log = RunLog()
    log.end(log.begin(begun()), Ended(status="crashed", reason="/home/me/secret.py failed on gpu-box-7"))
    log.begin(begun())
    write_shared(tmp_path / "b.runs.jsonl", log.runs)
    text = (tmp_path / "b.runs.jsonl").read_text()
    assert "secret" not in text and "lab" not in text and "gpu-box-7" not in text
    (run,) = read_runs(tmp_path / "b.runs.jsonl")
    assert run.strategy["stages"][0]["blocks"] == ["0", "1"] and run.strategy["stages"][0]["recompute"] == {"1": "full"}
    assert run == shared(log.runs)[0]
    with pytest.raises(InputError, match="exists"):
        write_shared(tmp_path / "b.runs.jsonl", log.runs)
