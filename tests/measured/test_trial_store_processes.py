"""The store of trials among processes: two that write at once, one that is killed, one that may not write, a full disk."""

from __future__ import annotations

import os
import random
import sqlite3
import time

import pytest
from trial_store_helpers import PROBLEM, done, new_store, output, spawn

from rlplace.errors import InputError
from rlplace.measured.store import TrialStore

WRITE = """
with new_store(sys.argv[1]) as store:
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        store.finish(store.begin(begun(number, run=sys.argv[2])), done(number, run=sys.argv[2]))
        print(number, flush=True)
"""


def test_processes_that_make_and_write_one_file(tmp_path):
    writers = [spawn(WRITE, tmp_path / "t.sqlite", first, first + 25) for first in (0, 100)]
    for writer in writers:
        output(writer)
    with TrialStore(tmp_path / "t.sqlite") as store:
        for first in (0, 100):
            assert store.trials(run=str(first)) == [done(n, run=str(first)) for n in range(first, first + 25)]
        assert len(store.trials(include_running=True)) == 50
        assert len(store.problems()) == 2


def test_kills_at_any_moment(tmp_path):
    draw = random.Random(7)
    writers = [(tmp_path / f"{index}.sqlite", spawn(WRITE, tmp_path / f"{index}.sqlite", 0, 10**6)) for index in range(3)]
    for path, writer in writers:
        writer.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.15))
        writer.kill()
        told = [0, *(int(line) for line in writer.stdout.read().split("\n")[:-1])]
        writer.communicate()
        with TrialStore(path) as store:
            kept = store.trials()
            assert kept == [done(number, run="0") for number in range(len(kept))]
            assert len(kept) in (len(told), len(told) + 1)  # it may have been killed before it told of the last
            assert len(store.interrupted("0")) <= 1
            store.add(done(0))


def test_a_transaction_cut_in_two_is_undone(tmp_path):
    code = """
store = new_store(sys.argv[1])
for number in range(20):
    store.add(done(number))
store._database.execute("PRAGMA cache_size = 1")  # so that changed pages go to the file before the end of the transaction
store._database.execute("BEGIN IMMEDIATE")
store._database.execute("UPDATE trials SET reason = hex(randomblob(1500))")
print("half", flush=True)
import time
time.sleep(60)
"""
    process = spawn(code, tmp_path / "t.sqlite")
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()
    assert (tmp_path / "t.sqlite-journal").stat().st_size > 0
    with TrialStore(tmp_path / "t.sqlite", create=False) as store:
        assert store.trials() == [done(number) for number in range(20)]
    assert [path.name for path in tmp_path.iterdir()] == ["t.sqlite"]


def test_a_file_that_may_not_be_written(tmp_path):
    code = """
import os, shutil, tempfile
from rlplace.errors import InputError
folder = tempfile.mkdtemp()  # one that others may enter, too
try:
    path = Path(folder) / "t.sqlite"
    with new_store(path) as store:
        store.add(done(0))
        number = store.begin(begun(1))
    path.chmod(0o444)
    os.chmod(folder, 0o555)
    if os.fork() == 0:
        if os.getuid() == 0:  # whom no permission stops
            os.setuid(65534)
        with TrialStore(path) as store:
            assert store.trials() == [done(0)]
            calls = [lambda: store.add(done(2)), lambda: store.begin(begun(2)), lambda: store.finish(number, done(1))]
            for call in [*calls, lambda: store.discard(number), lambda: TrialStore(Path(folder) / "new.sqlite")]:
                try:
                    call()
                except InputError as error:
                    print(error, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
finally:
    os.chmod(folder, 0o755)
    shutil.rmtree(folder)
"""
    lines = output(spawn(code)).splitlines()
    assert len(lines) == 5
    assert all("t.sqlite: the file or its folder is read-only" in line for line in lines[:4])
    assert "is read-only" in lines[4]


def test_a_full_disk(tmp_path):
    with new_store(tmp_path / "t.sqlite") as store:
        pages = store._database.execute("PRAGMA page_count").fetchone()[0]
        store._database.execute(f"PRAGMA max_page_count = {pages}")
        added = []
        with pytest.raises(InputError, match="the disk is full; what was finished before is kept"):
            for number in range(1000):
                store.add(done(number, reason="x" * 4000))
                added.append(number)
        assert [trial.began_at for trial in store.trials()] == [1000.0 + number for number in added]
        store._database.execute("PRAGMA max_page_count = 100000")
        store.add(done(2000))
    with TrialStore(tmp_path / "t.sqlite") as store:
        assert len(store.trials()) == len(added) + 1


def test_the_file_is_readable_as_documented(tmp_path):
    with new_store(tmp_path / "t.sqlite") as store:
        store.add(done(6))
    plain = sqlite3.connect(tmp_path / "t.sqlite")
    text = "SELECT json_array_length(device_of_group), json_extract(step_s, '$[1]'), status FROM trials WHERE problem = ?"
    assert plain.execute(text, (PROBLEM.fingerprint,)).fetchall() == [(PROBLEM.num_groups, 0.2, "done")]
    assert plain.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    plain.close()
    assert os.listdir(tmp_path) == ["t.sqlite"]
