"""Two processes that write the same outputs while a third one reads them: whatever is read is whole, and of one writer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplace.agents.checkpoint import load_checkpoint
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
from rlplace.agents.labels import Labels
from rlplace.cluster import Cluster
from rlplace.comparing import Settings, Store
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem

torch.set_num_threads(1)
seeds, out, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
problem = dataclasses.replace(Problem.load(seeds / "toy.problem.json"), name=f"writer{number}" * 200)
plan = dataclasses.replace(PlacementPlan.load(seeds / "stages.plan.json"), seed=number)
cluster = Cluster.preset(f"l4:{number + 1}")
labels = Labels.load(seeds / "labels.npz")
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
    labels.save(out / "x.npz")
    rows.add_row(row)
    save_checkpoint(out / "agent", network, environment="rlplace/Refinement-v0", training={"writer": number},
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
    from rlplace.agents.labels import Labels
    from rlplace.comparing import Settings, Store

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
    Labels.load(tmp_path / "x.npz")
    assert seen == {1, 2} and reads > 3
    store = Store(Settings(calls=4), tmp_path / "rows.jsonl", resume=True)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3 + 50, "a line of each turn of each writer"
    assert {row.step_time_s for row in store.rows.values() if row.planner == "heft"} <= {1.0, 2.0}
    left = {"x.problem.json", "x.plan.json", "x.toml", "x.npz", "rows.jsonl", "agent"}
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
        holder.communicate("\n", timeout=60)
    with locked(tmp_path, shared=True), locked(tmp_path, shared=True, patience_s=100):
        pass
    with locked(tmp_path / "none"):
        pass
