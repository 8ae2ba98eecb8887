"""Outputs that cannot be written: one line, an exit code, nothing half-written, and known before long work where it can be."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlplace.cli.main import main

PLAN = ["simulate", "{s}/toy.problem.json", "{s}/stages.plan.json"]
TOY = ["{s}/toy.problem.json"]
LEARN = ["--measurements", "{s}/trials.sqlite", "--fit-steps", "1", "--rehearse", "0"]
TRAIN = ["train", "--problems", *TOY, "--cases", "1", "--fit-steps", "0", "--steps", "0", "--test", *TOY, "--calls", "1"]
QUICK = {
    "place": ["place", *TOY, "--planner", "heft", "--out", "{o}/p.plan.json"],
    "simulate": [*PLAN, "--trace", "{o}/t.json"],
    "compare": ["compare", *TOY, "--planners", "heft", "--seeds", "1", "--out", "{o}/c.json"],
    "compare lines": ["compare", *TOY, "--planners", "heft", "--seeds", "1", "--out", "{o}/c.jsonl"],
    "compare csv": ["compare", *TOY, "--planners", "heft", "--seeds", "1", "--csv", "{o}/c.csv"],
    "calibrate": ["calibrate", "{s}/mlp.measure.json", "--cluster", "cpu:1", "--out", "{o}/c.cost.json"],
}
LONGER = {
    "capture": ["capture", "zoo:mlp", "--cluster", "l4:2", "--batch", "2", "--out", "{o}/x.problem.json"],
    "measure": ["measure", "zoo:mlp", "--step", "--batch", "2", "--repeats", "1", "--out", "{o}/m.measure.json"],
    "finetune": ["finetune", *LEARN, "--out", "{o}/tuned"],
    "train": [*TRAIN, "--out", "{o}/run"],
}
VERBS = QUICK | LONGER


def run(name, seeds, out, capsys):
    """Exit code and what is said on stderr."""
    capsys.readouterr()
    code = main([word.format(s=seeds, o=out) for word in VERBS[name]])
    return code, capsys.readouterr().err.splitlines()


def told(lines):
    """The one line about what went wrong."""
    errors = [line for line in lines if line.startswith("rlplace: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], lines
    assert "unexpected" not in errors[0] and errors[0].isprintable()
    return errors[0]


@pytest.mark.parametrize("name", VERBS)
def test_where_nothing_can_be_written_is_said_before_any_work(name, seeds, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    where = {"under a file": tmp_path / "file"} | ({} if name in ("finetune", "train") else {"nowhere": tmp_path / "none"})
    for out in where.values():
        code, lines = run(name, seeds, out, capsys)
        assert code == 2
        assert "cannot be" in told(lines)
        assert len(lines) == 1, "it began to work"
    assert sorted(os.listdir(tmp_path)) == ["file"] and (tmp_path / "file").read_text() == "x"


def no_room(name, seeds, tmp_path, capsys):
    """Files may not grow beyond some bytes, as where a disk is full or a quota used up."""
    if name == "finetune":
        seeds = shutil.copytree(seeds, tmp_path / "seeds")  # SQLite's journal is written beside the file
    out = tmp_path / "out"
    out.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        code, lines = run(name, seeds, out, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    left = [path for path in out.rglob("*") if path.is_file()]
    return code, told(lines), left


@pytest.mark.parametrize("name", QUICK)
def test_no_room_for_the_result(name, seeds, tmp_path, capsys):
    code, line, left = no_room(name, seeds, tmp_path, capsys)
    assert code in (1, 2) and "cannot be written: File too large" in line
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_no_room_for_the_result_of_longer_work(name, seeds, tmp_path, capsys):
    code, line, left = no_room(name, seeds, tmp_path, capsys)
    assert code in (1, 2) and "cannot be written: File too large" in line
    assert not left


@pytest.mark.parametrize("name", ["place", "compare", "calibrate"])
def test_no_room_leaves_what_was_there(name, seeds, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    target = out / VERBS[name][-1].removeprefix("{o}/")
    if name != "compare":  # which does not write over another one
        target.write_text("what was there")
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        run(name, seeds, out, capsys)
    finally:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not target.exists() if name == "compare" else target.read_text() == "what was there"
    assert len(os.listdir(out)) == (name != "compare")


def test_rows_of_a_comparison_when_the_disk_fills_up(seeds, tmp_path, monkeypatch):
    """Half a line that did not fit is taken away again; the comparison goes on when there is room."""
    from rlplace.comparing import Settings, Store
    from rlplace.errors import InputError

    path = Path(shutil.copy(seeds / "rows.jsonl", tmp_path))
    store = Store(Settings(calls=4), path, resume=True)
    before, row = path.read_bytes(), next(iter(store.rows.values()))
    whole = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: whole(handle, data[: len(data) // 2]))
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        store.add_row(row)
    assert path.read_bytes() == before
    monkeypatch.undo()
    store.add_row(row)
    assert len(Store(Settings(calls=4), path, resume=True).rows) == 1


SCRIPT = """
import os, subprocess, sys
from rlplace.cli.main import main
seeds, folder = sys.argv[1:3]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], check=True)
words = ["place", f"{seeds}/toy.problem.json", "--planner", "heft", "--out", f"{folder}/p.plan.json"]
print("MOUNTED", file=sys.stderr)
print("CODE", main(words), file=sys.stderr)
before = open(f"{folder}/p.plan.json", "rb").read()
with open(f"{folder}/filler", "wb", buffering=0) as stream:
    try:
        while stream.write(b"x" * 4096):
            pass
    except OSError:
        pass
print("CODE", main(words), file=sys.stderr)
print("CODE", main(["simulate", words[1], f"{seeds}/stages.plan.json", "--trace", f"{folder}/t.json"]), file=sys.stderr)
train = ["train", "--problems", words[1], "--fit-steps", "0", "--steps", "0", "--out", f"{folder}/run"]
print("CODE", main(train), file=sys.stderr)
assert open(f"{folder}/p.plan.json", "rb").read() == before
print("FULL", sorted(os.listdir(folder)), file=sys.stderr)
os.unlink(f"{folder}/filler")
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
for last in (words, ["capture", "zoo:mlp", "--cluster", "l4:2", "--out", f"{folder}/x.problem.json"],
             ["finetune", "--measurements", f"{seeds}/trials.sqlite", "--out", f"{folder}/tuned"],
             ["train", "--problems", words[1], "--out", f"{folder}/more"]):
    print("CODE", main(last), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_full_and_a_read_only_file_system(seeds, tmp_path):
    """For root, whom modes of files do not stop, with mounts that nobody else sees."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace of one's own is not permitted here")
    (tmp_path / "disk").mkdir()
    command = ["unshare", "-m", sys.executable, "-c", SCRIPT, str(seeds), str(tmp_path / "disk")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    if "MOUNTED" not in done.stderr:
        pytest.skip("mounting is not permitted here")
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stderr.splitlines() if line.startswith("CODE")]
    assert codes == ["CODE 0", *["CODE 2"] * 7], done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("rlplace: ")]
    assert len(errors) == 7 and all("cannot be written: No space left on device" in line for line in errors[:3])
    assert all("read-only" in line.lower() for line in errors[3:]), errors
    assert "Traceback" not in done.stderr
    left = next(line for line in done.stderr.splitlines() if line.startswith("FULL"))
    assert "t.json" not in left and ".tmp" not in left
    assert "capturing" not in done.stderr, "the read-only folder is found out before the work"
