"""Two writers of one file, and outputs that cannot be written: one line, an exit code, nothing half-written."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplace.agents.checkpoint import load_checkpoint
from rlplace.cli.main import main
from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.files import locked, write_files
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem

WRITER = """
import dataclasses, os, sys, time
import msgspec, torch
from pathlib import Path
from rlplace.agents.checkpoint import load_checkpoint, save_checkpoint
from rlplace.agents.move_ranking import PricedMoves
from rlplace.cluster import Cluster
from rlplace.explanation.compare import Settings, Store
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem

torch.set_num_threads(1)
seeds, out, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
problem = dataclasses.replace(Problem.load(seeds / "toy.problem.json"), name=f"writer{number}" * 200)
plan = dataclasses.replace(PlacementPlan.load(seeds / "ordered.plan.json"), seed=number)
cluster = Cluster.preset(f"l4:{number + 1}")
labels = PricedMoves.load(seeds / "labels.safetensors")
network = load_checkpoint(seeds / "agent").network
with torch.no_grad():
    for value in network.parameters():
        value.fill_(number)
rows = Store(Settings(calls=4), out / "rows.jsonl", resume=True)
row = msgspec.structs.replace(next(iter(rows.rows.values())), planner="heft", step_time_s=float(number), binding="b" * 20_000)
print("ready", flush=True)
sys.stdin.readline()
for turn in range(25):
    problem.save(out / "x.problem.json")
    plan.save(out / "x.plan.json")
    cluster.save(out / "x.toml")
    labels.save(out / "x.safetensors")
    rows.add_row(row)
    save_checkpoint(out / "agent", network, training={"writer": number},
                    card=f"writer{number}")
"""


def look(out: Path) -> set[int]:
    """Loads everything; the writers that it came from."""
    found = set()
    problem = Problem.load(out / "x.problem.json")
    assert problem.name in ("writer1" * 200, "writer2" * 200)
    found.add(int(problem.name[6]))
    found.add(PlacementPlan.load(out / "x.plan.json").seed)
    assert len(Cluster.load(out / "x.toml").devices) in (2, 3)
    checkpoint = load_checkpoint(out / "agent")
    weights = {x for parameter in checkpoint.network.parameters() for x in parameter.detach().flatten().tolist()}
    assert weights == {float(checkpoint.training["writer"])}, "weights of one writer under the config of the other"
    return found | {int(checkpoint.training["writer"])}


@pytest.mark.slow
def test_every_read_is_whole(seeds, tmp_path):
    from rlplace.agents.move_ranking import PricedMoves
    from rlplace.explanation.compare import Settings, Store

    (tmp_path / "rows.jsonl").write_bytes((seeds / "rows.jsonl").read_bytes())
    arguments = [sys.executable, "-c", WRITER, str(seeds), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*arguments, str(number)], **pipes) for number in (1, 2)]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "ready\n", writer.stderr.read()
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        while not (tmp_path / "agent" / "card.md").exists():
            time.sleep(0.001)
        seen, reads = set(), 0
        while any(writer.poll() is None for writer in writers):
            seen |= look(tmp_path)
            reads += 1
        for writer in writers:
            assert writer.wait(60) == 0, writer.stderr.read()
    finally:
        for writer in writers:
            if writer.poll() is None:
                writer.kill()
            writer.communicate()
    look(tmp_path)
    PricedMoves.load(tmp_path / "x.safetensors")
    assert seen == {1, 2} and reads > 3
    store = Store(Settings(calls=4), tmp_path / "rows.jsonl", resume=True)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3 + 50, "a line of each turn of each writer"
    assert {row.step_time_s for row in store.rows.values() if row.planner == "heft"} <= {1.0, 2.0}
    left = {"x.problem.json", "x.plan.json", "x.toml", "x.safetensors", "rows.jsonl", "agent"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_files_appear_together_or_not_at_all(tmp_path, monkeypatch):
    import os

    write_files(tmp_path, {"a": b"1", "b": b"1"})
    whole, count = os.fsync, []

    def full(handle):
        count.append(1)
        if len(count) == 2:
            raise OSError(28, "No space left on device")
        whole(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="b: cannot be written: No space left"):
        write_files(tmp_path, {"a": b"2", "b": b"2"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"1", "b": b"1"}


def test_a_lock_keeps_others_out_and_is_not_waited_for_for_ever(tmp_path):
    code = "import sys; from rlplace.files import locked\nwith locked(sys.argv[1]):"
    code += " print('held', flush=True); sys.stdin.readline()"
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        begin = time.monotonic()
        with locked(tmp_path, shared=True, patience_s=0.2):
            assert time.monotonic() - begin >= 0.2
    finally:
        holder.communicate("\n", timeout=600)
    with locked(tmp_path, shared=True), locked(tmp_path, shared=True, patience_s=100):
        pass
    with locked(tmp_path / "none"):
        pass


PLAN = ["simulate", "{s}/toy.problem.json", "{s}/ordered.plan.json"]
TOY = ["{s}/toy.problem.json"]
TRAIN = ["train", "--problems", *TOY, "--cases", "1", "--fit-steps", "0", "--steps", "0", "--test", *TOY, "--calls", "1"]
QUICK = {
    "place": ["place", *TOY, "--planner", "heft", "--out", "{o}/p.plan.json"],
    "simulate": [*PLAN, "--trace", "{o}/t.json"],
    "compare": ["compare", *TOY, "--planners", "heft", "--seeds", "1", "--out", "{o}/c.jsonl"],
    "compare csv": ["compare", *TOY, "--planners", "heft", "--seeds", "1", "--csv", "{o}/c.csv"],
    "calibrate": ["calibrate", "{s}/mlp.measure.json", "--cluster", "cpu:1", "--out", "{o}/c.cost.json"],
}
LONGER = {
    "capture": ["capture", "zoo:mlp", "--cluster", "l4:2", "--batch", "2", "--out", "{o}/x.problem.json"],
    "measure": ["measure", "zoo:mlp", "--step", "--batch", "2", "--repeats", "1", "--out", "{o}/m.measure.json"],
    "train": [*TRAIN, "--out", "{o}/run"],
}
VERBS = QUICK | LONGER


def run(name, seeds, out, capsys):
    """Returns exit code and what is said on stderr."""
    capsys.readouterr()
    code = main([word.format(s=seeds, o=out) for word in VERBS[name]])
    return code, capsys.readouterr().err.splitlines()


def told(lines):
    """Returns the one line about what went wrong."""
    errors = [line for line in lines if line.startswith("rlplace: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], lines
    assert "unexpected" not in errors[0] and errors[0].isprintable()
    return errors[0]


@pytest.mark.parametrize("name", VERBS)
def test_where_nothing_can_be_written_is_said_before_any_work(name, seeds, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    where = {"under a file": tmp_path / "file"} | ({} if name == "train" else {"nowhere": tmp_path / "none"})
    for out in where.values():
        code, lines = run(name, seeds, out, capsys)
        assert code == 2
        assert "cannot be" in told(lines)
        assert len(lines) == 1, "it began to work"
    assert sorted(os.listdir(tmp_path)) == ["file"] and (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)])
def test_no_room_for_the_result(name, seeds, tmp_path, capsys):
    """Files may not grow beyond some bytes, as where a disk is full or a quota used up; what was there stays."""
    out = tmp_path / "out"
    out.mkdir()
    target = out / VERBS[name][-1].removeprefix("{o}/")
    if name in ("place", "calibrate"):  # which write over another one
        target.write_text("what was there")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        code, lines = run(name, seeds, out, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code in (1, 2) and "cannot be written: File too large" in told(lines)
    left = {path: path.read_text() for path in out.rglob("*") if path.is_file()}
    assert left == ({target: "what was there"} if name in ("place", "calibrate") else {})


def test_rows_of_a_comparison_when_the_disk_fills_up(seeds, tmp_path, monkeypatch):
    """Half a line that did not fit is taken away again; the comparison goes on when there is room."""
    from rlplace.errors import InputError
    from rlplace.explanation.compare import Settings, Store

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
